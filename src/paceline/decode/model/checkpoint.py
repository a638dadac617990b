"""Weights, config and tokenizer of a model, whatever file format they came in.

Every loader ends at the same check: the tensors are exactly those the Transformers module of that config has,
in name and in shape. What is missing, left over or of another shape is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.decode.model.experts import fuse_experts
from paceline.decode.model.families import check_family
from paceline.decode.model.features import features_of, head_width, windowed_layers
from paceline.decode.model.gguf_file import GGUFFile
from paceline.decode.model.gguf_model import gguf_config, gguf_tensors
from paceline.decode.model.gguf_tokenizer import gguf_end_ids, gguf_tokenizer, gguf_vocab_size
from paceline.decode.model.parameter_shapes import parameter_shapes
from paceline.decode.model.safetensors_files import (
    folder_config,
    folder_end_ids,
    folder_tensors,
    folder_tokenizer,
)
from paceline.decode.model.source import ModelSource, SourceKind, resolve_source
from paceline.decode.model.spans import Ring
from paceline.decode.model.stored import Stored, StoredTensors
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import ModelFormatError

__all__ = ["Checkpoint", "CheckpointInfo", "inspect_checkpoint", "load_checkpoint"]

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Checkpoint:
    """A model found whole, ready to be put into its module.

    name           as the user gave it
    config         Transformers config from which `AutoModelForCausalLM.from_config` builds the module
    tensors        Hugging Face parameter name -> tensor, read when it is looked up; no `lm_head.weight` where it is
                   the embedding
    tokenizer      None only where the files carry none
    eos_token_ids  every id that ends a text, from whichever file names one
    vocab_size     real token ids; rows of the head from there on are padding
    max_positions  context length in tokens
    """

    name: str
    config: Any
    tensors: StoredTensors
    tokenizer: TextTokenizer | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_positions: int


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint without its weights: everything `Checkpoint` says but the tensors.

    parameters       weights in all, a tied head counted once
    parameters_read  weights a decode step reads: all, but of an embedding that is no head just a row
    """

    name: str
    config: Any
    tokenizer: TextTokenizer | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_positions: int
    parameters: int
    parameters_read: int

    def weight_bytes(self, bytes_per_weight: float) -> int:
        return int(self.parameters * bytes_per_weight)

    def kv_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Keys and values of a sequence of `tokens`; a layer with a sliding window holds no more than its ring."""
        windowed = windowed_layers(self.config)
        most = Ring.holding(self.config.sliding_window).rows if any(windowed) else 0
        kept = sum(min(tokens, most) if narrow else tokens for narrow in windowed)
        return 2 * kept * self.config.num_key_value_heads * head_width(self.config) * bytes_per_value


def load_checkpoint(spec: str, *, dtype: torch.dtype, progress: Callable[[str], None] | None = None) -> Checkpoint:
    """The model `spec` (see `source.py`), its weights in `dtype` still to be taken from the disk.

    Raises ModelNotFound, ModelFormatError or UnsupportedModel, each saying what to do.
    """
    source = resolve_source(spec, progress)
    opened = _open(source)
    config = opened.config
    config.dtype = dtype
    expected = parameter_shapes(config)
    tensors = StoredTensors(opened.tensors(dtype), progress, source.path.name)
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        del tensors["lm_head.weight"]
    check_tensors(tensors.shapes(), expected, str(source.path))
    return Checkpoint(
        name=spec,
        config=config,
        tensors=tensors,
        tokenizer=opened.tokenizer,
        eos_token_ids=opened.eos_token_ids,
        vocab_size=opened.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def inspect_checkpoint(spec: str, progress: Callable[[str], None] | None = None) -> CheckpointInfo:
    """The model `spec` without its weights; of a Hugging Face repository only JSON files are fetched."""
    opened = _open(resolve_source(spec, progress, weights=False))
    config = opened.config
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return CheckpointInfo(
        name=spec,
        config=config,
        tokenizer=opened.tokenizer,
        eos_token_ids=opened.eos_token_ids,
        vocab_size=opened.vocab_size,
        max_positions=config.max_position_embeddings,
        parameters=parameters,
        parameters_read=parameters - looked_up,
    )


@dataclass(frozen=True)
class _Opened:
    """What both formats give before any weight is read, and where the weights are."""

    config: Any
    tokenizer: TextTokenizer | None
    eos_token_ids: frozenset[int]
    vocab_size: int
    tensors: Callable[[torch.dtype], dict[str, Stored]]


def _open(source: ModelSource) -> _Opened:
    return _open_gguf(source) if source.kind is SourceKind.GGUF else _open_folder(source)


def _open_gguf(source: ModelSource) -> _Opened:
    file = GGUFFile(source.path)
    config = gguf_config(file)
    check_family(config, str(source.path))
    features_of(config)
    tokenizer = gguf_tokenizer(file)
    return _Opened(
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=gguf_end_ids(file),
        vocab_size=min(gguf_vocab_size(file) or config.vocab_size, config.vocab_size),
        tensors=lambda dtype: gguf_tensors(file, config, dtype),
    )


def _open_folder(source: ModelSource) -> _Opened:
    config = folder_config(source.path)
    check_family(config, str(source.path))
    features_of(config)
    tokenizer = folder_tokenizer(source.path)
    size = config.vocab_size if tokenizer is None else min(tokenizer.size, config.vocab_size)
    return _Opened(
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=folder_end_ids(source.path, config, tokenizer),
        vocab_size=size,
        tensors=lambda dtype: fuse_experts(folder_tensors(source.path, dtype), config),
    )


def check_tensors(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ModelFormatError unless `given` has the names and shapes of `expected`."""
    if missing := expected.keys() - given.keys():
        raise ModelFormatError(f"{where} lacks {_listed(missing)}; download it again or convert it again.")
    if extra := given.keys() - expected.keys():
        raise ModelFormatError(f"{where} has {_listed(extra)}, which its config has no place for.")
    wrong = [name for name in expected if given[name] != expected[name]]
    if wrong:
        name = wrong[0]
        raise ModelFormatError(
            f"{where}: {name} has shape {given[name]} and the config says {expected[name]} "
            f"({len(wrong)} tensors disagree); the config belongs to another model."
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return f"{len(ordered)} tensor{'s' * (len(ordered) > 1)} ({', '.join(ordered[:_NAMES_SHOWN])}{more})"
