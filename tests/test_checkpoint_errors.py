"""Every model that cannot be loaded is refused in one sentence that says what to do."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny_models import finish, save_folder, stored_tensors, tiny_backend, tiny_model, write_gguf

from paceline.decode.model.checkpoint import inspect_checkpoint, load_checkpoint
from paceline.errors import ModelFormatError, ModelNotFound, UnsupportedModel, UsageError


def refused(spec: Path | str, kind: type[UsageError], *words: str) -> None:
    """Loading `spec` raises `kind` in one line with `words`."""
    with pytest.raises(kind) as caught:
        load_checkpoint(str(spec), dtype=torch.float32)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    for word in words:
        assert word in text, (word, text)


def test_missing_files(tmp_path: Path) -> None:
    refused(tmp_path / "no.gguf", ModelNotFound, "no.gguf", "smollm2-135m")
    refused("smolm2-135m", ModelNotFound, "did you mean smollm2-135m")
    refused("gpt2", ModelNotFound, "Hugging Face id")
    refused("", UsageError, "empty")
    (tmp_path / "w.bin").write_bytes(b"x")
    refused(tmp_path / "w.bin", UsageError, "never read")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    refused(tmp_path / "w.safetensors", UsageError, str(tmp_path))


def test_offline_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, allow_patterns: list[str]) -> str:
        assert not any(word in pattern for pattern in allow_patterns for word in ("bin", "pt", "py"))
        raise LocalEntryNotFoundError(f"{name} is not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("owner/name", ModelNotFound, "owner/name", "network")


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 200, 2_000, -200])
def test_truncated_gguf(tmp_path: Path, keep: int) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend()).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    refused(tmp_path / "cut.gguf", ModelFormatError, "cut.gguf")


def test_damaged_headers_end_in_a_sentence_or_in_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = write_gguf(path, tiny_model(num_hidden_layers=1)).read_bytes()
    refusals = 0
    for at in range(0, 700, 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            inspect_checkpoint(str(path))
        except UsageError as error:
            refusals += 1
            assert "\n" not in str(error), at
    assert refusals > 50


def test_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 and a zip file")
    refused(path, ModelFormatError, "no GGUF", "PK")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    refused(path, UnsupportedModel, "version 9")


def test_folders_without_a_model(tmp_path: Path) -> None:
    refused(tmp_path, ModelFormatError, "config.json")
    folder = save_folder(tmp_path / "m", tiny_model(), None)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refused(folder, ModelFormatError, "other.safetensors", "rename")
    (folder / "other.safetensors").unlink()
    refused(folder, ModelFormatError, "no weights in safetensors")
    (folder / "model.gguf").write_bytes(b"GGUF")
    refused(folder, ModelFormatError, "model.gguf")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refused(folder, ModelFormatError, "pickle", "pytorch_model.bin", "save_pretrained")
    for text, word in (("{", "JSON"), ("[]", "object"), ("{}", "model_type")):
        (folder / "config.json").write_text(text)
        refused(folder, ModelFormatError, word)


def test_missing_and_damaged_safetensors(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", tiny_model(), None, 40_000)
    first = min(folder.glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(data[:-100])
    refused(folder, ModelFormatError, first.name, "download it again")
    first.unlink()
    refused(folder, ModelFormatError, first.name, "1 of ")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, ModelFormatError, "weight_map")


@pytest.mark.parametrize("name", ["mamba", "falcon_h1", "qwen3_next", "rwkv"])
def test_recurrent_models_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    refused(tmp_path, UnsupportedModel, name, "recurrent state cannot be rolled back", "qwen2")


@pytest.mark.parametrize(("name", "word"), [("deepseek_v3", "latent attention"), ("gemma3", "text model alone")])
def test_other_kinds_of_models_are_refused_with_the_reason(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    refused(tmp_path, UnsupportedModel, f"is a {name} model", word, "gemma3_text")


@pytest.mark.parametrize(("name", "word"), [("mamba2", "rolled back"), ("gemma", "not supported")])
def test_gguf_architectures_are_refused_by_name(tmp_path: Path, name: str, word: str) -> None:
    finish(gguf.GGUFWriter(tmp_path / "m.gguf", name))
    refused(tmp_path / "m.gguf", UnsupportedModel, name, word, "llama")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"] * 16}, "linear_attention"),
        ({"model_type": "gpt2"}, "gemma3_text, llama, mistral, mixtral, phi3, qwen2"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_of_models_that_are_not_supported(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, UnsupportedModel, word)


def test_missing_left_over_and_misshapen_tensors(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "m.gguf"
    write_gguf(path, model, without=["blk.1.ffn_up.weight"])
    refused(path, ModelFormatError, "lacks 1 tensor ", "model.layers.1.mlp.up_proj.weight")
    write_gguf(path, model, without=["token_embd.weight"])
    refused(path, ModelFormatError, "token_embd.weight")
    write_gguf(path, model, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    refused(path, UnsupportedModel, "blk.0.attn_sinks.weight")
    write_gguf(path, model, extra={"blk.2.ffn_up.weight": stored_tensors(model)["blk.1.ffn_up.weight"]})
    refused(path, ModelFormatError, "no place", "model.layers.2.mlp.up_proj.weight")
    write_gguf(path, model, extra={"blk.0.ffn_up.weight": np.zeros((90, 64), np.float32)})
    refused(path, ModelFormatError, "(90, 64)", "(96, 64)")
    folder = save_folder(tmp_path / "m", model, None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    refused(folder, ModelFormatError, "(96, 64)", "(100, 64)")


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.rope.scaling.type": "odd"}, "'odd'"),
        ({"llama.rope.dimension_count": 8}, "rotary"),
        ({"split.count": 3}, "3 parts"),
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "odd-cut"}, "'odd-cut'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.5}, "0.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_that_cannot_be_read(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend(), metadata=metadata)
    refused(path, UnsupportedModel, word)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.block_count": "two"}, "allowed: a int"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"tokenizer.chat_template": "{% if %}"}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_that_makes_no_sense(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend(), metadata=metadata)
    if not word:
        loaded = load_checkpoint(str(path), dtype=torch.float32)
        assert loaded.tokenizer is not None
        with pytest.raises(ModelFormatError, match="Jinja"):
            loaded.tokenizer.render_chat([{"role": "user", "content": "hi"}])
        return
    refused(path, ModelFormatError, word)
