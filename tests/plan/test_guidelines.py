"""The five guidelines: perturb the model or the device, and number and verdict change."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import scenario

from paceline.plan import guidelines as g
from paceline.plan.acceptance import constant_acceptance
from paceline.plan.frontier import candidate
from paceline.plan.mechanisms import Mechanism
from paceline.plan.residuals import validated_spread


def _candidate(s, kind: str = "eagle3", rate: float = 0.8, name: str | None = None):
    mechanism = Mechanism(kind, model=scenario(name).shape if name else None, name=name)
    return candidate(s, mechanism, constant_acceptance(rate, "test"), list(range(1, 65)), 10, [640.0])


def test_products_fill_at_an_eighth_of_the_batch() -> None:
    made = g.fill_the_products(scenario(hardware="h100"), 16, 3)
    whole, eighth = (
        made.values["batch at the ridge, D = 0"].value,
        made.values["batch at the ridge, D = 7"].value,
    )
    assert eighth == pytest.approx(whole / 8)
    other = g.fill_the_products(scenario(hardware="h200"), 16, 3)
    assert other.values["rows at the ridge"].value < made.values["rows at the ridge"].value
    assert other.verdict != made.verdict
    mixture = g.fill_the_products(scenario("qwen3-30b-a3b", "h100"), 16, 3)
    assert mixture.values["batch at the ridge, D = 0"].value > 8 * whole


def test_a_slower_memory_moves_the_ridge_in_proportion() -> None:
    s = scenario()
    slow = dataclasses.replace(s.hardware, bandwidth_bytes_per_s=s.hardware.bandwidth_bytes_per_s / 2)
    fast, slower = (g.fill_the_products(x, 16, 3) for x in (s, dataclasses.replace(s, hardware=slow)))
    assert slower.values["rows at the ridge"].value == pytest.approx(
        2 * fast.values["rows at the ridge"].value
    )


@pytest.mark.parametrize(
    ("model", "tensor", "start"),
    [
        ("llama-3.1-8b", 1, 31),
        ("llama-3.1-70b", 8, 15),
        ("qwen3-235b-a22b", 4, 7),
        ("deepseek-v3", 1, 0),
        ("minimax-m2.5", 8, 20),
    ],
)
def test_where_to_begin_in_attention(model: str, tensor: int, start: int) -> None:
    made = g.start_length(scenario(model, "h200", "fp8", tensor), 8, 3)
    assert made.values["draft length to begin at"].value == start


def test_the_rule_applies_where_attention_dominates() -> None:
    short = g.start_length(scenario("qwen3-235b-a22b", "h200", "fp8", 4, prompt=512), 64, 3)
    long = g.start_length(scenario("qwen3-235b-a22b", "h200", "fp8", 4, prompt=60_000), 64, 3)
    assert "does not bind" in short.verdict
    assert "rule applies" in long.verdict
    assert long.disagreement == "the full model's best length here is D = 3, not 7."
    assert g.start_length(scenario("qwen3-235b-a22b", "h200", "fp8", 4), 64, 7).disagreement == ""


def test_whole_tiles() -> None:
    s = scenario("qwen3-235b-a22b", "h200", "fp8", 4)
    made = g.attention_tiles(s, 31, 7)
    assert "D = 7, 15, 23, 31" in made.verdict
    assert made.values["rows of the last tile at the chosen length"].value == 1.0
    partly = g.attention_tiles(s, 31, 9)
    assert partly.values["rows of the last tile at the chosen length"].value == pytest.approx(160 / 256)
    assert "partly filled" in partly.disagreement


def test_low_latency_counts_more_than_layers() -> None:
    s = scenario()
    spread = validated_spread(s.shape)
    made = g.low_latency(_candidate(s), spread)
    assert made.values["rho"].value == pytest.approx(1 / 32)
    assert made.values["speedup by the full model"].value < made.values["speedup by the rule"].value
    assert made.values["best length by the full model"].value <= made.values["best length by the rule"].value
    heavy = g.low_latency(_candidate(s, "model", 0.8, "llama-3.2-3b"), spread)
    assert heavy.values["rho"].value > 0.3
    assert heavy.values["best length by the rule"].value < made.values["best length by the rule"].value


def test_mechanisms_are_weighed_by_speed_not_by_length() -> None:
    s = scenario()
    long_but_dear, short_but_cheap = (
        _candidate(s, "model", 0.9, "llama-3.2-3b"),
        _candidate(s, "eagle3", 0.75),
    )
    made = g.weigh_mechanisms([long_but_dear, short_but_cheap], validated_spread(s.shape))
    assert "eagle3 at batch 1" in made.verdict
    assert "longest acceptance" in made.disagreement
    alone = g.weigh_mechanisms([_candidate(s, "eagle3", 0.0)], validated_spread(s.shape))
    assert "none at batch 1" in alone.verdict
