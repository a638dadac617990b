"""The step cost: its slow twin, its laws, and bad input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidParameter
from paceline.plan.acceptance import constant_acceptance
from paceline.plan.constants import Constants, prior_constants
from paceline.plan.cost import Layout, Precision, pad_rows, price, smooth_maximum, step_time
from paceline.plan.experts import active_experts, effective_tokens
from paceline.plan.mechanisms import KINDS, Mechanism, draft_seconds
from paceline.plan.rounds import evaluate, target_cost
from paceline.plan.timings import Ledger

MODELS = [
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "gpt-oss-120b",
    "qwen3.6-35b-a3b",
    "deepseek-v4-flash",
]


def _slow_dense_step(s, batch: float, width: float, context: float) -> float:
    """Llama-like step by plain arithmetic, one operator at a time."""
    c, shape, hw = s.priced_by, s.shape, s.hardware
    rows = float(pad_rows(np.array(batch * width)))
    tiled = np.ceil(rows / 16) * 16
    rate, flops = (
        hw.bandwidth_bytes_per_s * c.weight_bandwidth,
        hw.flops_per_s["bf16"] * c.compute_by_format["bf16"],
    )

    def product(weights: float, moved: float, kernels: float) -> float:
        a, b = (2 * weights + 2 * rows * moved) / rate, 2 * weights * tiled / flops
        return c.kernel_s * kernels + (a**3 + b**3) ** (1 / 3)

    att, ffn = shape.attention[0], shape.feed_forward[0]
    n, h = shape.layers, shape.hidden
    total = c.host_s
    total += product(n * att.weights, n * (2 * h + 2 * att.heads * att.head_dim), 2 * n)
    total += product(n * 3 * h * ffn.inner, n * (2 * h + 2 * ffn.inner), 2 * n)
    read = n * batch * context * att.row_width * 2 / (hw.bandwidth_bytes_per_s * c.kv_bandwidth)
    queries = att.group * width
    tile = (
        16
        if queries <= 16
        else 32
        if queries <= 32
        else 64
        if queries <= 64
        else np.ceil(queries / 128) * 128
    )
    scored = n * 2 * batch * att.kv_heads * tile * context * 2 * att.head_dim / flops
    total += (read**3 + scored**3) ** (1 / 3) + n * (c.attention_s + c.pair_s * batch * att.kv_heads)
    head = product(h * shape.vocab, h, 1)
    a, b = (
        (2 * h * shape.vocab + 2 * rows * h + 12 * rows * shape.vocab) / rate,
        2 * h * shape.vocab * tiled / flops,
    )
    head = c.kernel_s + (a**3 + b**3) ** (1 / 3) + 8 * c.elementwise_s + rows * c.row_s
    total += head + n * rows * h * 16 / rate + 5 * n * c.elementwise_s
    return float(total)


@given(st.integers(1, 600), st.integers(1, 33), st.integers(0, 60_000))
@settings(max_examples=60, deadline=None)
def test_dense_step_equals_its_slow_twin(batch: int, width: int, context: int) -> None:
    s = scenario()
    fast = float(step_time(s.shape, s.hardware, batch, context, width).total_s)
    assert fast == pytest.approx(_slow_dense_step(s, batch, width, context), rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_a_grid_is_its_points(model: str) -> None:
    s = scenario(model, "h200", "fp8", 8, 8)
    batches, widths, contexts = np.array([1.0, 8, 96]), np.array([1.0, 4, 8]), np.array([100.0, 9000])
    grid = target_cost(s, batches[:, None, None], widths[None, :, None], contexts[None, None, :]).total_s
    for i, b in enumerate(batches):
        for j, q in enumerate(widths):
            for k, ctx in enumerate(contexts):
                alone = float(target_cost(s, b, q, ctx).total_s)
                assert alone == pytest.approx(float(grid[i, j, k]), rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_more_work_never_takes_less_time(model: str) -> None:
    s = scenario(model, "b200", "fp8", 8)
    batches = np.arange(1, 300)
    by_batch = np.asarray(target_cost(s, batches, 1.0, 2048.0).total_s)
    assert (np.diff(by_batch) >= -1e-15).all()
    by_width = np.asarray(target_cost(s, 8.0, np.arange(1, 40), 2048.0).total_s)
    assert (np.diff(by_width) >= -1e-15).all()
    by_context = np.asarray(target_cost(s, 8.0, 4.0, np.arange(0, 50_000, 500)).total_s)
    assert (np.diff(by_context) >= -1e-15).all()


def test_the_cache_is_read_once_however_many_tokens_are_scored() -> None:
    """At a long context and small batch 8 scored tokens cost hardly more attention than one."""
    s = scenario("llama-3.1-70b", "h100", tensor=8)
    one, eight = (target_cost(s, 4.0, q, 60_000.0).by_operator_s["attention"] for q in (1.0, 2.0))
    assert float(eight) < 1.1 * float(one)


def test_sparse_attention_shares_nothing() -> None:
    s = scenario("glm-5", "b200", "fp4", 8, 8)
    starts = dataclasses.replace(s.priced_by, attention_s=0.0, pair_s=0.0)
    s = dataclasses.replace(s, constants=starts)
    one, four = (float(target_cost(s, 64.0, q, 60_000.0).by_operator_s["attention"]) for q in (1.0, 4.0))
    assert four == pytest.approx(4 * one, rel=0.02)


def test_recurrent_layers_pay_for_every_token() -> None:
    s = scenario("qwen3.6-35b-a3b", "h200", "fp8")
    none = dataclasses.replace(s.priced_by, attention_s=0.0)
    s = dataclasses.replace(s, constants=none)
    one, four = (float(target_cost(s, 64.0, q, 1.0).by_operator_s["state"]) for q in (1.0, 4.0))
    assert four / one == pytest.approx((0.53 + 0.445 * 4) / (0.53 + 0.445), rel=1e-9)


@pytest.mark.parametrize(("experts", "active"), [(128, 8), (256, 8), (8, 2), (384, 6)])
def test_experts_by_simulation(experts: int, active: int) -> None:
    """4,000 draws; the mean of distinct experts lies within 5 standard errors (false alarm below 1e-5 a
    case).
    """
    rng = np.random.default_rng(3)
    for tokens in (1, 3, 16):
        keys = rng.random((4000, tokens, experts))
        chosen = np.argpartition(keys, active, axis=2)[:, :, :active]
        counts = np.array([len(np.unique(c)) for c in chosen])
        error = counts.std() / np.sqrt(len(counts)) + 1e-9
        assert abs(counts.mean() - float(active_experts(experts, active, tokens))) < 5 * error + 1e-6


def test_skewed_routing_touches_fewer_experts() -> None:
    tokens = np.array([1.0, 4, 16, 64, 4096])
    even, skewed = active_experts(128, 8, tokens), active_experts(128, 8, tokens, 0.8)
    assert (skewed[1:-1] < even[1:-1]).all()
    assert skewed[0] == pytest.approx(8, rel=0.02)
    assert (skewed <= 128).all()


def test_tokens_of_one_request_route_alike() -> None:
    assert float(effective_tokens(4, 4, 0.0)) == 16
    assert float(effective_tokens(4, 4, 1.0)) == 4
    assert float(effective_tokens(1, 4, 0.5)) == 2.5
    with pytest.raises(InvalidParameter):
        effective_tokens(1, 1, 1.5)


@given(st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_smooth_maximum_lies_between_maximum_and_sum(a: float, b: float) -> None:
    for p in (1.7, 3.0, 8.0):
        value = float(smooth_maximum(np.array(a), np.array(b), p))
        assert max(a, b) * (1 - 1e-9) <= value <= (a + b) * (1 + 1e-9)
    assert float(smooth_maximum(np.array(a), np.array(b), 3.0)) == pytest.approx((a**3 + b**3) ** (1 / 3))


@given(st.integers(1, 5000))
def test_padding(rows: int) -> None:
    padded = float(pad_rows(np.array(rows)))
    assert rows <= padded < rows + 16
    assert float(pad_rows(np.array(padded))) == padded


def test_tensor_parallelism_splits_and_talks() -> None:
    one, four = scenario("llama-3.1-70b", "h200"), scenario("llama-3.1-70b", "h200", tensor=4)
    alone, split = (target_cost(s, 8.0, 1.0, 1024.0) for s in (one, four))
    assert float(split.total_s) < float(alone.total_s)
    assert "collectives" in split.by_operator_s
    assert "collectives" not in alone.by_operator_s
    with pytest.raises(InvalidParameter, match="no link"):
        target_cost(scenario("llama-3.1-8b", "m4-max", tensor=2), 1.0, 1.0, 10.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_prices_as_the_grid(kind: str) -> None:
    s = scenario("qwen3-30b-a3b", "h200")
    mechanism = Mechanism(kind, model=scenario("qwen3-0.6b").shape if kind == "model" else None)
    lengths = [0, 1, 3, 5] if kind != "none" else [0]
    acceptance = None if kind == "none" else constant_acceptance(0.7, "test")
    grid = evaluate(s, mechanism, acceptance, [1, 16, 200], lengths, [1000.0])
    for i, b in enumerate((1, 16, 200)):
        ledger = Ledger.of(s, mechanism, [b] * len(lengths), lengths, [1000.0] * len(lengths))
        np.testing.assert_allclose(ledger.round_s(s.priced_by), grid.round_s[i, :, 0], rtol=1e-12)
        assert (np.diff(grid.round_s[i, :, 0]) >= 0).all()


def test_drafting_costs_nothing_at_length_zero() -> None:
    s = scenario()
    for kind in ("ngram", "eagle3", "mtp", "dspark", "layer-skip"):
        assert float(draft_seconds(Mechanism(kind), s, 8.0, 0.0, 1000.0)) == 0.0
        assert float(draft_seconds(Mechanism(kind), s, 8.0, 1.0, 1000.0)) > 0.0


def test_block_drafters_cost_the_same_at_every_length() -> None:
    s = scenario()
    short, long = (float(draft_seconds(Mechanism("dflash"), s, 8.0, d, 1000.0)) for d in (1.0, 8.0))
    assert short == long


@pytest.mark.parametrize(
    ("name", "values"), [("batch", (0, 10, 1)), ("width", (1, 10, 0)), ("context", (1, -1, 1))]
)
def test_bad_points_are_refused(name: str, values: tuple[float, float, float]) -> None:
    s = scenario()
    batch, context, width = values[0], values[1], values[2]
    with pytest.raises(InvalidParameter, match=name):
        step_time(s.shape, s.hardware, batch, context, width)


def test_bad_layouts_and_formats_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="tp"):
        Layout(0)
    with pytest.raises(InvalidParameter, match="multiple or a divisor"):
        Layout(4, 6)
    with pytest.raises(InvalidParameter, match="dtype"):
        Precision("fp7")
    with pytest.raises(InvalidParameter, match="engine"):
        prior_constants("hbm", "nobody")
    with pytest.raises(InvalidParameter, match="draft kind"):
        Mechanism("medusa")


def test_priced_work_scales_with_its_constants() -> None:
    s = scenario()
    faster = dataclasses.replace(s, constants=Constants(weight_bandwidth=1.0, kv_bandwidth=1.0))
    assert float(target_cost(faster, 1.0, 1.0, 100.0).total_s) < float(
        target_cost(s, 1.0, 1.0, 100.0).total_s
    )
    assert float(price([], Constants()).total_s) == Constants().host_s
