"""Known models and devices, and shapes read from configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.errors import InvalidParameter, ModelFormatError, ModelNotFound
from paceline.plan.config import find_model, hub_id, list_models, shape_from_config
from paceline.plan.hardware import find_hardware, list_hardware

PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_the_tables_are_large_enough_and_sourced() -> None:
    assert len(list_models()) >= 22
    assert len(list_hardware()) >= 25
    assert all(m.source for m in list_models())
    assert all(d.source for d in list_hardware())
    assert {d.family for d in list_hardware()} == {"hbm", "gddr", "apple", "cpu"}


@pytest.mark.parametrize("shape", list_models(), ids=lambda s: s.name)
def test_parameters_agree_with_the_name(shape) -> None:
    """Weights counted from the shape come within 8 % (small models: 25 %) of the figure in the model's name,
    active ones within 40 %.
    """
    total = re.search(r"-(\d+(?:\.\d+)?)([bm])(?:-|$)", shape.name)
    if total and "x" not in shape.name:
        wanted = float(total[1]) * (1e9 if total[2] == "b" else 1e6)
        assert shape.parameters == pytest.approx(wanted, rel=0.25 if wanted < 7.5e9 else 0.08)
    active = re.search(r"-a(\d+(?:\.\d+)?)b$", shape.name)
    if active:
        assert shape.active_parameters == pytest.approx(float(active[1]) * 1e9, rel=0.4)


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v3", 671), ("kimi-k2", 1026), ("mixtral-8x7b", 46.7), ("glm-4.7", 355)]
)
def test_parameters_of_models_without_a_figure_in_the_name(name: str, billions: float) -> None:
    assert find_model(name).parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_cached_bytes_are_the_published_ones() -> None:
    """131,072 and 327,680 bytes a token for Llama-3.1-8B and 70B, 70,272 for DeepSeek-V3, in bf16."""
    assert 2 * find_model("llama-3.1-8b").kv_numbers_per_token() == 131_072
    assert 2 * find_model("llama-3.1-70b").kv_numbers_per_token() == 327_680
    assert 2 * find_model("deepseek-v3").kv_numbers_per_token() == 70_272


def test_layers_are_told_apart() -> None:
    windows = shape_from_config("w", {**PLAIN, "sliding_window": 8, "sliding_window_pattern": 2}, "test")
    assert [(a.layers, a.window) for a in windows.attention] == [(2, None), (2, 8)]
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    linear = {
        f"linear_{k}": v
        for k, v in {"num_key_heads": 2, "key_head_dim": 8, "num_value_heads": 4, "value_head_dim": 8}.items()
    }
    hybrid = shape_from_config("h", {**PLAIN, "layer_types": kinds, **linear}, "test")
    assert [(a.kind, a.layers) for a in hybrid.attention] == [("full", 1), ("linear", 3)]
    assert hybrid.state_numbers() == 3 * 4 * 8 * 8
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
    mixture = shape_from_config("m", {**PLAIN, **moe}, "test")
    assert [(f.layers, f.experts) for f in mixture.feed_forward] == [(3, 8), (1, 0)]


def test_text_config_counts() -> None:
    nested = shape_from_config("n", {"model_type": "vision", "text_config": PLAIN}, "test")
    assert nested.hidden == 64


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelFormatError, match=field):
        shape_from_config("broken", {k: v for k, v in PLAIN.items() if k != field}, "test")


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True])
def test_a_malformed_field_is_named(value: object) -> None:
    with pytest.raises(ModelFormatError, match="hidden_size"):
        shape_from_config("broken", {**PLAIN, "hidden_size": value}, "test")


def test_more_active_experts_than_there_are() -> None:
    with pytest.raises(ModelFormatError, match="at most all"):
        shape_from_config("broken", {**PLAIN, "num_experts": 4, "num_experts_per_tok": 8}, "test")


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    assert find_model(tmp_path).layers == find_model(tmp_path / "config.json").layers == 4
    (tmp_path / "other.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFormatError, match="not JSON"):
        find_model(tmp_path / "other.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        find_model(tmp_path / "empty")


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match="qwen3-32b"):
        find_model("qwen3-33b")
    with pytest.raises(InvalidParameter, match="h100"):
        find_hardware("h101")


def test_hub_ids() -> None:
    assert hub_id("qwen3-8b") == "Qwen/Qwen3-8B"
    assert hub_id("someone/else") == "someone/else"
    assert find_model("Qwen/Qwen3-8B").name == "qwen3-8b"
