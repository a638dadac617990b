"""Checkpoints: what is loaded is what Transformers and the gguf package say it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import (
    MARKERS,
    VOCABULARY,
    finish,
    rotary_rows,
    save_folder,
    tiny_backend,
    tiny_model,
    write_gguf,
)
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.decode.model.checkpoint import Checkpoint, inspect_checkpoint, load_checkpoint
from paceline.decode.model.families import FAMILIES
from paceline.decode.model.fetch import KNOWN_MODELS, cache_folder, cached_model
from paceline.decode.model.gguf_file import GGUFFile
from paceline.decode.model.llama import LlamaDecoder

KINDS = gguf.GGMLQuantizationType
WRITABLE = [KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1]
READABLE = [KINDS.Q2_K, KINDS.Q3_K, KINDS.Q4_K, KINDS.Q5_K, KINDS.Q6_K, KINDS.IQ4_NL, KINDS.IQ4_XS]
IDS = torch.tensor([[5, 77, 130, 9, 300, 41, 8, 260]])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama-tied": {"kind": "llama", "tie_word_embeddings": True},
    "llama-biased": {"kind": "llama", "attention_bias": True},
    "llama-mha": {"kind": "llama", "num_key_value_heads": 4},
    "qwen2": {"kind": "qwen2"},
    "qwen2-tied": {"kind": "qwen2", "tie_word_embeddings": True},
}


def module_of(checkpoint: Checkpoint) -> Any:
    """The stock Transformers module with the checkpoint's weights; every parameter must be given."""
    module = AutoModelForCausalLM.from_config(checkpoint.config)
    left = module.load_state_dict(checkpoint.tensors, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    module.tie_weights()
    return module.eval()


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(IDS).logits


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_gguf_in_float32_equals_the_transformers_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny_model(**settings)
    loaded = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", model)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.tensors[name], parameter), name
    assert torch.equal(logits(module_of(loaded)), logits(model))


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_gguf_equals_the_packages_own_dequantisation(tmp_path: Path, family: str, kind: KINDS) -> None:
    model, twin = tiny_model(family), tiny_model(family, seed=1)
    loaded = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", model, kind)), dtype=torch.float32)
    heads = {"q_proj.weight": 4, "k_proj.weight": 2} if family == "llama" else {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if value.ndim == 2:
            count = next((heads[end] for end in heads if name.endswith(end)), None)
            order = np.arange(len(value)) if count is None else rotary_rows(np.arange(len(value)), count)
            back = gguf.quants.dequantize(gguf.quants.quantize(value[order], kind), kind)
            value = np.empty_like(back)
            value[order] = back
        assert np.array_equal(loaded.tensors[name].numpy(), value), name
        twin.get_parameter(name).data.copy_(torch.from_numpy(value.copy()))
    assert torch.equal(logits(module_of(loaded)), logits(twin))


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_types_only_llama_cpp_writes_are_read_as_the_package_reads_them(tmp_path: Path, kind: KINDS) -> None:
    """More rows than are dequantised at once, and a count that no chunk size divides."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (777, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("matrix", raw, raw_dtype=kind)
    finish(writer)
    file = GGUFFile(tmp_path / "m.gguf")
    whole = gguf.quants.dequantize(raw, kind)
    assert whole.shape == (777, 2 * block)
    assert np.array_equal(file.read("matrix", torch.float32).numpy(), whole)
    order = np.random.default_rng(1).permutation(777)
    assert np.array_equal(file.read("matrix", torch.float32, order).numpy(), whole[order])
    assert torch.equal(file.read("matrix", torch.bfloat16), torch.from_numpy(whole).to(torch.bfloat16))


def test_header_agrees_with_the_packages_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), KINDS.Q8_0, tiny_backend())
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.offset, entry.size_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize("shard_bytes", [None, 40_000])
def test_folder_equals_the_transformers_model(tmp_path: Path, shard_bytes: int | None) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    folder = save_folder(tmp_path / "m", model, tiny_backend(), shard_bytes)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_bytes is not None)
    loaded = load_checkpoint(str(folder), dtype=torch.float32)
    assert "lm_head.weight" not in loaded.tensors
    assert torch.equal(logits(module_of(loaded)), logits(model))
    half = load_checkpoint(str(folder), dtype=torch.bfloat16)
    assert {t.dtype for t in half.tensors.values()} == {torch.bfloat16}
    assert half.config.dtype is torch.bfloat16


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads))
    loaded = load_checkpoint(str(save_folder(tmp_path / "m", model.eval(), None)), dtype=torch.float32)
    assert loaded.tokenizer is None
    assert torch.equal(logits(module_of(loaded)), logits(model))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rotary_scaling_keys(tmp_path: Path, scaling: dict[str, Any]) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 10000.0} | scaling)
    keys = {
        "llama.rope.scaling.type": scaling["rope_type"],
        "llama.rope.scaling.factor": scaling["factor"],
        "llama.rope.scaling.original_context_length": 32,
    }
    scaled, plain = (
        load_checkpoint(str(write_gguf(tmp_path / f"{name}.gguf", model, metadata=metadata)), dtype=torch.float32)
        for name, metadata in (("scaled", keys), ("plain", {}))
    )
    assert torch.equal(logits(module_of(scaled)), logits(model))
    assert not torch.allclose(logits(module_of(plain)), logits(model), atol=1e-3)


def test_llama3_rotary_factors(tmp_path: Path) -> None:
    """llama.cpp's converter stores one divisor for each frequency; the logits are those of `llama3`."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model(rope_parameters=scaling)
    unscaled = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (unscaled / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(factors.round(3).tolist())) > 2
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    loaded = load_checkpoint(str(path), dtype=torch.float32)
    torch.testing.assert_close(logits(module_of(loaded)), logits(model), atol=1e-4, rtol=1e-4)


def test_vocabulary_padding_and_end_ids(tmp_path: Path) -> None:
    """Ten rows are padding; the end ids are the file's own and the control tokens that end a text by name."""
    backend = tiny_backend()
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=backend)
    loaded = load_checkpoint(str(path), dtype=torch.float32)
    assert loaded.vocab_size == backend.get_vocab_size() == VOCABULARY - 10
    assert loaded.config.vocab_size == VOCABULARY
    assert loaded.eos_token_ids == {MARKERS.index("<|endoftext|>"), MARKERS.index("<|im_end|>")}
    assert loaded.max_positions == 128
    folder = save_folder(tmp_path / "m", tiny_model(), backend)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    loaded = load_checkpoint(str(folder), dtype=torch.float32)
    assert loaded.eos_token_ids == {0, 2}
    assert loaded.vocab_size == VOCABULARY - 10


def test_inspection_reads_no_weights_and_agrees(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    folder = save_folder(tmp_path / "m", model, tiny_backend())
    file = write_gguf(tmp_path / "m.gguf", model, KINDS.Q8_0, tiny_backend())
    for part in folder.glob("*.safetensors"):
        part.unlink()
    for spec in (folder, file):
        info = inspect_checkpoint(str(spec))
        assert info.parameters == model.num_parameters()
        assert info.parameters_read == model.num_parameters() - VOCABULARY * 64
        assert info.vocab_size == VOCABULARY - 10
        assert info.kv_bytes(10, 2) == 2 * 10 * 2 * 2 * 16 * 2
        assert info.weight_bytes(2) == 2 * info.parameters


def test_progress_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    loaded = load_checkpoint(str(path), dtype=torch.float32, progress=lines.append)
    assert not lines, "nothing is read before it is taken"
    LlamaDecoder(loaded.config, loaded.tensors, torch.device("cpu"))
    assert lines[0].startswith("reading m.gguf: 0 of ") and not loaded.tensors


@pytest.mark.models
def test_smollm2_equals_transformers_own_gguf_reader() -> None:
    """An independent reader of the same file: every tensor equal, and the settings that shape the logits."""
    path = cached_model(KNOWN_MODELS["smollm2-135m"], cache_folder())
    if path is None:
        pytest.skip("smollm2-135m is not in the cache; `paceline pull smollm2-135m` brings it")
    ours = load_checkpoint("smollm2-135m", dtype=torch.float32)
    pytest.importorskip("accelerate", reason="Transformers reads GGUF files only with accelerate")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    weights = dict(theirs.named_parameters())
    assert weights.keys() == ours.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, weights[name]), name
    assert ours.config.rope_parameters["rope_theta"] == 100_000.0
    assert ours.config.rms_norm_eps == 1e-5
    assert ours.max_positions == 8192
    assert ours.eos_token_ids == {0, 2}
