"""A model in a folder, as Transformers saves it: `config.json`, safetensors, tokenizer files.

Pickled weights (`*.bin`, `*.pt`, `*.pth`) can run code when they are opened and are never read; code of the
repository is never run either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.decode.model.families import one_line
from paceline.decode.model.stored import Stored, read_bytes
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["folder_config", "folder_end_ids", "folder_tensors", "folder_tokenizer"]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Computed from the config, and saved by old releases of Transformers.
_RECOMPUTED = ".rotary_emb.inv_freq"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def folder_config(folder: Path) -> Any:
    """The Transformers config in `folder`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    values = read_json(folder, "config.json")
    if not isinstance(values.get("model_type"), str):
        raise ModelFormatError(f"{folder / 'config.json'} names no model_type; it is not a language model's config.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"{folder} is a {values['model_type']} model, which the installed Transformers cannot configure "
            f"({one_line(error)})."
        ) from error


def folder_tensors(folder: Path, dtype: torch.dtype) -> dict[str, Stored]:
    """Every weight in `folder` in `dtype` under its own name, still on the disk."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Stored] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu"):  # checks the header against the file
                tensors |= _stored(path, dtype)
        except (SafetensorError, OSError) as error:
            raise ModelFormatError(f"{path} cannot be read ({error}); download it again.") from error
    return tensors


def _stored(path: Path, dtype: torch.dtype) -> dict[str, Stored]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    entries = {n: e for n, e in header.items() if n != "__metadata__" and not n.endswith(_RECOMPUTED)}
    return {name: _entry(path, name, entry, 8 + size, dtype) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: Mapping[str, Any], start: int, dtype: torch.dtype) -> Stored:
    if entry["dtype"] not in _FLOATS:
        raise UnsupportedModel(f"{path}: {name} is stored as {entry['dtype']}; allowed: {', '.join(_FLOATS)}.")
    kind, shape = _FLOATS[entry["dtype"]], tuple(entry["shape"])
    offset, row = start + entry["data_offsets"][0], math.prod(shape[1:]) * kind.itemsize

    def rows(low: int, high: int) -> torch.Tensor:
        data = torch.from_numpy(read_bytes(path, offset + low * row, (high - low) * row))
        return data.view(kind).view(-1, *shape[1:]).to(dtype)

    return Stored(shape, rows)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = read_json(folder, _INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelFormatError(f"{folder / _INDEX} has no weight_map; download it again.")
        files = sorted({folder / str(name) for name in names.values()})
        if absent := [f.name for f in files if not f.is_file()]:
            raise ModelFormatError(
                f"{folder} lacks {', '.join(absent[:3])} ({len(absent)} of {len(files)} parts); download it again."
            )
        return files
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    raise ModelFormatError(_why_no_weights(folder))


def _why_no_weights(folder: Path) -> str:
    if pickles := sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern)):
        return (
            f"{folder} has its weights only as pickles ({pickles[0]}), which can run code when opened and "
            "are never read; save them with Transformers' `save_pretrained`, which writes safetensors, or "
            "take a repository that has them."
        )
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"{folder} has no safetensors; to use the GGUF in it, give the file itself: {ggufs[0]}."
    if odd := sorted(p.name for p in folder.glob("*.safetensors")):
        return f"{folder} has {odd[0]} but neither {_WHOLE} nor {_INDEX}; rename a whole model to {_WHOLE}."
    return f"{folder} has no weights in safetensors; a model folder has {_WHOLE}, or {_INDEX} with its parts."


def folder_tokenizer(folder: Path) -> TextTokenizer | None:
    """The tokenizer in `folder`; None where there is none."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        raise UnsupportedModel(
            f"the tokenizer in {folder} cannot be read ({one_line(error)}); a tokenizer.json is needed."
        ) from error
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    return TextTokenizer(
        backend,
        prefix_ids=_prefix(backend),
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        chat_templates=templates or {},
    )


def _prefix(backend: Any) -> list[int]:
    """The ids the tokenizer puts in front of a text of its own accord."""
    plain = backend.encode("a", add_special_tokens=False).ids
    marked = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return list(marked[:start])
    return []


def folder_end_ids(folder: Path, config: Any, tokenizer: TextTokenizer | None) -> frozenset[int]:
    """Ids that end a text according to the generation config, the config or the tokenizer."""
    found = _ids(config.eos_token_id)
    if (folder / "generation_config.json").is_file():
        found |= _ids(read_json(folder, "generation_config.json").get("eos_token_id"))
    if tokenizer is not None:
        found |= _ids(tokenizer.eos_token_id)
    return frozenset(found)


def _ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """The JSON object in `folder / name`."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFormatError(f"{folder} has no {name}; a model folder has one beside its weights.") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFormatError(f"{path} is not readable JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is not a JSON object; download it again.")
    return value
