"""Acceptance: kinds of rates, importers, mixtures, resampling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.estimate import Origin
from paceline.core.records import StepRecord, TraceWriter
from paceline.errors import InvalidParameter, ModelFormatError, UsageError
from paceline.plan.acceptance import (
    Acceptance,
    Mixture,
    acceptance_from_length,
    acceptance_from_lengths,
    acceptance_from_share,
    acceptance_from_survival,
    constant_acceptance,
)
from paceline.plan.importers import (
    acceptance_from_points,
    acceptance_from_prometheus,
    acceptance_from_records,
    list_published,
    published_acceptance,
    read_acceptance,
)

rates = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(rates, st.integers(0, 20))
def test_length_is_bounded_and_rises(conditional: list[float], longest: int) -> None:
    lengths = Acceptance(tuple(conditional), "test").lengths(longest)
    assert lengths[0] == 1.0
    assert (np.diff(lengths) >= 0).all()
    assert (lengths <= 1 + np.arange(longest + 1) + 1e-12).all()


@given(rates)
def test_survival_and_conditional_are_one_thing(conditional: list[float]) -> None:
    survival = np.cumprod(conditional)
    again = acceptance_from_survival([float(s) for s in survival], "test")
    np.testing.assert_allclose(again.survival(len(survival)), survival, atol=1e-12)


@given(st.floats(0, 1), st.integers(1, 16))
def test_a_length_gives_its_constant_acceptance_back(value: float, length: int) -> None:
    al = float(constant_acceptance(value, "test").lengths(length)[length])
    found = acceptance_from_length(min(al, 1 + length), length, "test")
    assert float(found.lengths(length)[length]) == pytest.approx(al, abs=1e-9)


def test_zero_and_one_are_legal() -> None:
    assert list(Acceptance((0.0,), "never").lengths(3)) == [1, 1, 1, 1]
    assert list(Acceptance((1.0,), "always").lengths(3)) == [1, 2, 3, 4]
    assert float(acceptance_from_share(0.0, 4, "x").conditional[0]) == pytest.approx(0, abs=1e-9)
    assert float(acceptance_from_share(1.0, 4, "x").conditional[0]) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), float("inf")])
def test_rates_outside_zero_to_one_are_refused(bad: float) -> None:
    with pytest.raises(InvalidParameter, match="position 2"):
        Acceptance((0.5, bad), "test")


def test_impossible_inputs_are_refused_with_the_bound() -> None:
    with pytest.raises(InvalidParameter, match="1 to 4"):
        acceptance_from_length(4.5, 3, "test")
    with pytest.raises(InvalidParameter, match="--acceptance"):
        acceptance_from_survival([0.5, 0.6], "test")
    with pytest.raises(InvalidParameter, match="1 to 2"):
        acceptance_from_lengths([2.1], "test")
    with pytest.raises(InvalidParameter, match="sum to 1"):
        Mixture(((0.5, constant_acceptance(0.5, "a")),))


def test_noisy_independent_runs_are_made_monotone() -> None:
    """AL 3.77, 3.73, 3.47 at D = 6, 7, 8 (a block drafter past its block) cannot be one survival curve."""
    found = acceptance_from_lengths([1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47], "golden")
    survival = found.survival(8)
    assert (np.diff(survival) <= 1e-12).all()
    assert float(found.lengths(5)[5]) == pytest.approx(3.61, abs=0.01)


def test_points_with_gaps() -> None:
    found = acceptance_from_points({1: 1.706, 3: 2.411, 5: 2.693}, "traces")
    lengths = found.lengths(5)
    assert [float(lengths[d]) for d in (1, 3, 5)] == pytest.approx([1.706, 2.411, 2.693], abs=1e-6)


def test_extrapolation_is_flagged() -> None:
    found = Acceptance((0.8, 0.7), "test")
    assert found.estimate(2).origin is Origin.MEASURED
    assert found.estimate(5).origin is Origin.ASSUMED
    assert "extrapolated" in found.estimate(5).source


def test_the_mixture_adds_times_not_lengths() -> None:
    """Half the tokens at AL 1, half at AL 3: 1 / (.5 / 1 + .5 / 3) = 1.5 tokens a round, not 2."""
    never, mostly = constant_acceptance(0.0, "prose"), constant_acceptance(1.0, "copy")
    mixture = Mixture(((0.5, never), (0.5, mostly)))
    assert float(mixture.lengths(2)[2]) == pytest.approx(1.5)
    assert float(mixture.merged().lengths(2)[2]) == pytest.approx(1.5, abs=1e-6)


def _records(rng: np.random.Generator, requests: int, rates: tuple[float, ...]) -> list[StepRecord]:
    found = []
    for r in range(requests):
        for i in range(30):
            accepted = 0
            while accepted < len(rates) and rng.random() < rates[accepted]:
                accepted += 1
            found.append(StepRecord(f"r{r}", 0, i, 0.0, 1, 1 + len(rates), 100, "verify", "model", len(rates),
                                    accepted, accepted + 1, 0.0, 0.0, 0.0))  # fmt: skip
    return found


def test_a_trace_gives_its_rates_back(tmp_path: Path) -> None:
    """3,000 rounds; every rate within .05 (5 standard errors or more: false alarm below 1e-5)."""
    records = _records(np.random.default_rng(5), 100, (0.8, 0.6, 0.5))
    writer = TraceWriter(tmp_path / "trace.jsonl", {})
    for r in records:
        writer.write(r)
    writer.close()
    found = read_acceptance(str(tmp_path / "trace.jsonl"))
    assert found.conditional == pytest.approx((0.8, 0.6, 0.5), abs=0.05)
    assert len(found.draws) == 200
    estimate = found.estimate(3)
    assert estimate.low < estimate.value < estimate.high


def test_acceptance_of_a_rule_that_is_not_exact_says_so() -> None:
    records = _records(np.random.default_rng(5), 4, (0.8,))
    assert "not exact" not in acceptance_from_records(records, "t").source
    relaxed = [replace(r, verify="relaxed", lossless=False) for r in records[:1]] + records[1:]
    assert acceptance_from_records(relaxed, "t").source.endswith("not exact: relaxed")


def test_requests_are_resampled_whole() -> None:
    """Rounds that are alike inside a request widen the range; resampling rounds alone would not see it."""
    alike = []
    for r in range(20):
        for i in range(50):
            kept = 1 if r % 2 else 0
            alike.append(
                StepRecord(f"r{r}", 0, i, 0.0, 1, 2, 10, "verify", "model", 1, kept, 1 + kept, 0, 0, 0)
            )
    mixed = [
        StepRecord(
            f"r{i % 20}", 0, i, 0.0, 1, 2, 10, "verify", "model", 1, (i // 20) % 2, 1 + (i // 20) % 2, 0, 0, 0
        )
        for i in range(1000)
    ]
    spread = [np.std([d[0] for d in acceptance_from_records(r, "t").draws]) for r in (alike, mixed)]
    assert spread[0] > 5 * spread[1]


def test_a_trace_without_drafts_is_refused() -> None:
    with pytest.raises(UsageError, match="no verification rounds"):
        acceptance_from_records([], "empty")


VLLM = """
# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{model="a"} 1000.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 480.0
"""
TRT = """
trtllm_spec_decode_drafted_tokens_total{token_position="0"} 1000
trtllm_spec_decode_drafted_tokens_total{token_position="1"} 500
trtllm_spec_decode_accepted_tokens_total{token_position="0"} 800
trtllm_spec_decode_accepted_tokens_total{token_position="1"} 300
"""
SGL = "sglang:spec_accept_length 2.5\nsglang:spec_num_draft_tokens 5\n"


def test_prefix_accepted_counts_are_told_from_conditional_ones() -> None:
    assert acceptance_from_prometheus(VLLM, "m").conditional == pytest.approx((0.8, 0.6))
    llama = VLLM.replace("vllm:", "llamacpp:")
    assert acceptance_from_prometheus(llama, "m").conditional == pytest.approx((0.8, 0.6))
    # TensorRT-LLM says how many were drafted at position 2: 300 of 500, whatever the schedule cut.
    assert acceptance_from_prometheus(TRT, "m").conditional == pytest.approx((0.8, 0.6))
    assert float(acceptance_from_prometheus(SGL, "m").lengths(4)[4]) == pytest.approx(2.5)
    with pytest.raises(UsageError, match="no speculative decoding metrics"):
        acceptance_from_prometheus("process_cpu_seconds_total 1\n", "m")


def test_benchmark_results(tmp_path: Path) -> None:
    def write(value: object) -> str:
        path = tmp_path / "bench.json"
        path.write_text(json.dumps(value), encoding="utf-8")
        return str(path)

    rates = write({"spec_decode_per_position_acceptance_rates": [80.0, 48.0]})
    assert read_acceptance(rates).conditional == pytest.approx((0.8, 0.6))
    streaming = write({"mean_itl_ms": 44.3, "mean_tpot_ms": 44.3 / 2.82})
    assert float(read_acceptance(streaming + "@3").lengths(3)[3]) == pytest.approx(2.82)
    with pytest.raises(UsageError, match="@D"):
        read_acceptance(write({"accept_length": 2.5}))
    with pytest.raises(UsageError, match="random"):
        read_acceptance(write({"accept_length": 2.5, "dataset_name": "random"}) + "@3")
    with pytest.raises(UsageError, match="ignore_eos"):
        read_acceptance(write({"accept_length": 2.5, "ignore_eos": True}) + "@3")
    with pytest.raises(UsageError, match="no acceptance"):
        read_acceptance(write({"throughput": 1}))


def test_own_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    groups = [
        {"name": "greedy", "share": 0.5, "temperature": 0.0, "acceptance": [0.8]},
        {
            "name": "hot",
            "share": 0.5,
            "temperature": 1.0,
            "acceptance": [0.1],
            "by_context": [[2048, [0.1]], [None, [0.0]]],
        },
    ]
    path.write_text(json.dumps({"schema": "paceline.acceptance/1", "groups": groups}), encoding="utf-8")
    found = read_acceptance(str(path))
    assert len(found.parts) == 2
    assert found.lengths(1, 100)[1] > found.lengths(1, 50_000)[1]
    path.write_text(
        json.dumps({"schema": "paceline.acceptance/1", "groups": [{"rate": 1}]}), encoding="utf-8"
    )
    with pytest.raises(ModelFormatError, match="rate"):
        read_acceptance(str(path))


def test_the_grammar_of_the_command_line() -> None:
    assert read_acceptance("0.82,0.74").conditional == (0.82, 0.74)
    assert read_acceptance("0.8,0.48", survival=True).conditional == pytest.approx((0.8, 0.6))
    assert float(read_acceptance("AL:2.9@5").lengths(5)[5]) == pytest.approx(2.9)
    assert read_acceptance("share:0.416@8").conditional[0] == pytest.approx(0.8, abs=1e-3)
    with pytest.raises(InvalidParameter, match="position 1"):
        read_acceptance("1.2")
    with pytest.raises(UsageError, match="no readable file"):
        read_acceptance("nowhere.json")
    with pytest.raises(InvalidParameter, match="survival"):
        read_acceptance("published:x", survival=True)
    with pytest.raises(InvalidParameter, match="llama"):
        read_acceptance("published:llama-3.1-8b-eagle3-gsm9k")


@pytest.mark.parametrize("row", list_published(), ids=lambda r: r["name"])
def test_published_curves_reproduce_their_points(row) -> None:
    """Within .15 of each published AL; runs that contradict each other are the exceptions, within .6."""
    found = published_acceptance(row["name"])
    if "acceptance_length" in row:
        lengths = found.lengths(10)
        worst = max(abs(float(lengths[int(d)]) - v) for d, v in row["acceptance_length"].items())
        values = [row["acceptance_length"][d] for d in sorted(row["acceptance_length"], key=int)]
        steps = np.diff([1.0, *values])
        noisy = (np.diff(steps) > 0.02).any() or (steps < 0).any()
        assert worst < (0.6 if noisy else 0.15)
