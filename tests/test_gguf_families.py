"""GGUF files of every architecture, written under the gguf package's names, against the model they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import tiny_model, write_gguf

from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.model.linear import Form
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import Span, build_inputs
from paceline.errors import UnsupportedModel

KINDS = gguf.GGMLQuantizationType
HEADS = {"attention.key_length": 32, "attention.value_length": 32}
WINDOW = {"attention.sliding_window": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 32,
}
# Model type -> changes to the tiny config, metadata the file needs beside what every model has.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {}, HEADS),
    "qwen3_moe": (
        "qwen3_moe",
        {},
        HEADS | {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mixtral": ("mixtral", {}, {"expert_count": 4, "expert_used_count": 2}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        HEADS | WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7, "tie_word_embeddings": True},
        HEADS | WINDOW,
    ),
    "gemma3 linear": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 32,
            "sliding_window_pattern": 6,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        HEADS | WINDOW | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ("phi3", {"sliding_window": 16}, WINDOW),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        {"rope.dimension_count": 8, "rope.scaling.original_context_length": 32},
    ),
}


def write(folder: Path, name: str, kind: KINDS = KINDS.F32) -> tuple[Any, Path]:
    family, changes, keys = FAMILIES[name]
    model = tiny_model(family, 2, **changes)
    prefix = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama"}.get(family, family)
    extra = {}
    if name == "phi3 longrope":
        parts = (("short", "short_factor"), ("long", "long_factor"))
        extra = {f"rope_factors_{p}.weight": np.array(LONGROPE[key], np.float32) for p, key in parts}
    metadata = {f"{prefix}.{key}": value for key, value in keys.items()}
    return model, write_gguf(folder / "m.gguf", model, kind, metadata=metadata, extra=extra)


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_and_logits_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    """Through the decoder, on a text longer than the windows and the original context."""
    model, path = write(tmp_path, name)
    loaded = load_checkpoint(str(path), dtype=torch.float32)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.tensors[key], parameter, atol=2e-7, rtol=0)
    ids = [(7 * i * i + 3 * i) % 384 for i in range(50)]
    decoder = LlamaDecoder(loaded.config, loaded.tensors, torch.device("cpu"), form=Form.PLAIN)
    cache = decoder.new_cache(1, 64)
    cache.allocate(64)
    with torch.inference_mode(), cache.transaction() as transaction:
        transaction.reserve(0, 50)
        spans = [Span(0, 0, ids, prefill=True, limit=64)]
        step = build_inputs(spans, cache.capacity, decoder.geometry, decoder.row_policy)
        ours = decoder.forward(step, cache).logits[:50]
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_quantised_embeddings_and_experts(tmp_path: Path) -> None:
    """The embedding that is also the head, and weights of three dimensions, as the package dequantises them."""
    for name, key in (("gemma3", "model.embed_tokens.weight"), ("mixtral", "model.layers.1.mlp.experts.down_proj")):
        kind = KINDS.Q8_0
        if name == "mixtral":
            FAMILIES["mixtral 64"] = ("mixtral", {"intermediate_size": 64}, FAMILIES["mixtral"][2])
            name = "mixtral 64"
        model, path = write(tmp_path, name, kind)
        value = dict(model.named_parameters())[key].detach().numpy()
        flat = value.reshape(-1, value.shape[-1])
        back = gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind).reshape(value.shape)
        loaded = load_checkpoint(str(path), dtype=torch.float32)
        assert np.array_equal(loaded.tensors[key].numpy(), back)
        assert "lm_head.weight" not in loaded.tensors or name != "gemma3"


@pytest.mark.parametrize(
    ("family", "keys", "word"),
    [
        ("gemma3_text", {"gemma3.attention.sliding_window_pattern": 4}, "pattern"),
        ("qwen2", {"qwen2.expert_count": 4}, "mixtures of llama"),
    ],
)
def test_what_a_file_asks_for_and_nothing_reads_is_refused(
    tmp_path: Path, family: str, keys: dict[str, Any], word: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(family), metadata=keys)
    with pytest.raises(UnsupportedModel, match=word):
        load_checkpoint(str(path), dtype=torch.float32)
