"""The live cost: follows the machine, keeps cliffs, forgets stalls."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.control.cost import LiveCost, StepTimes, isotonic

SEED = StepTimes((1, 8, 16, 32), (0.010, 0.011, 0.013, 0.018))


def noisy(generator: random.Random, spread: float = 0.03) -> float:
    return math.exp(generator.gauss(0.0, spread))


def test_starts_where_it_was_seeded() -> None:
    cost = LiveCost(SEED, block=4)
    assert cost.seconds(1, 0, 1) == cost.seconds(4, 0, 1) == pytest.approx(SEED.at(4))
    assert cost.seconds(8, 0, 1) == pytest.approx(0.011)
    assert cost.seconds(9, 0, 1) == cost.seconds(12, 0, 1) == pytest.approx(0.012)


def test_finds_a_cliff_and_keeps_it() -> None:
    """What is really there: 1 to 8 rows cost 20 ms, more than 8 cost 40 ms. The seed knows of no cliff."""
    cost, generator = LiveCost(SEED, block=4), random.Random(1)
    for _ in range(400):
        rows = generator.choice((1, 5, 8, 9, 14))
        cost.observe(rows, 0, 1, (0.020 if rows <= 8 else 0.040) * noisy(generator))
    assert cost.seconds(8, 0, 1) / cost.seconds(1, 0, 1) == pytest.approx(1.0, abs=0.03)
    assert cost.seconds(9, 0, 1) / cost.seconds(8, 0, 1) == pytest.approx(2.0, rel=0.05)
    assert cost.seconds(1, 0, 1) == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("clip", [True, False])
def test_a_stall_is_nobodys_cost(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a hundred rounds of 8 rows take 50 times as long. The fault: errors are not clipped."""
    if not clip:
        monkeypatch.setattr("paceline.plan.control.cost._CLIP", 1e9)
    cost, generator = LiveCost(SEED, block=4), random.Random(2)
    worst = 0.0
    for i in range(1000):
        rows = 1 if i % 2 else 8
        stall = 50.0 if rows == 8 and i % 100 < 4 else 1.0
        cost.observe(rows, 0, 1, SEED.at(max(rows, 4)) * stall * noisy(generator))
        if i > 100:
            worst = max(worst, cost.seconds(8, 0, 1) / cost.seconds(1, 0, 1))
    assert (worst < 1.12) == clip, worst


def test_a_slower_machine_does_not_make_the_length_in_use_look_dear() -> None:
    """All rounds have 8 rows while the machine turns three times slower: 8 rows cost what they did beside 1."""
    cost, generator = LiveCost(SEED, block=4), random.Random(3)
    before = cost.seconds(8, 0, 1) / cost.seconds(1, 0, 1)
    for i in range(300):
        cost.observe(8, 0, 1, 0.011 * (3.0 if i > 150 else 1.0) * noisy(generator))
    assert cost.seconds(8, 0, 1) == pytest.approx(0.033, rel=0.05)
    assert cost.seconds(8, 0, 1) / cost.seconds(1, 0, 1) == pytest.approx(before, rel=0.12)


def test_learns_what_context_costs() -> None:
    seed = StepTimes((1, 8, 16, 32), (0.010, 0.011, 0.013, 0.018), key_s=1e-7)
    cost, generator = LiveCost(seed, block=4), random.Random(4)
    true = LiveCost(StepTimes(seed.rows, seed.seconds, 2e-7), block=4)
    for _ in range(3000):
        rows, context = generator.choice((1, 8)), generator.choice((512, 4096, 8192))
        keys = cost.keys(rows, context)
        cost.observe(rows, keys, 1, true.seconds(rows, keys, 1) * noisy(generator))
    assert cost.key_s == pytest.approx(2e-7, rel=0.25)


def test_forgets() -> None:
    cost = LiveCost(SEED, block=4)
    for i in range(1200):
        dear = 1.0 if i < 600 else 1.5
        rows = 1 if i % 2 else 16
        cost.observe(rows, 0, 1, SEED.at(max(rows, 4)) * (dear if rows == 16 else 1.0))
    ratio = cost.seconds(16, 0, 1) / cost.seconds(4, 0, 1)
    assert ratio == pytest.approx(1.5 * SEED.at(16) / SEED.at(4), rel=0.06)


def test_rows_past_the_largest_go_on_rising() -> None:
    cost = LiveCost(SEED, block=4, largest=64)
    assert cost.seconds(200, 0, 1) > cost.seconds(100, 0, 1) > cost.seconds(64, 0, 1)
    cost.observe(200, 0, 1, 0.001)
    assert cost.rounds == 0, "a pass larger than the table teaches nothing"


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12),
    st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
)
def test_isotonic_rises_and_keeps_what_rises(values: list[float], weights: list[float]) -> None:
    found = isotonic(values, weights[: len(values)])
    assert len(found) == len(values) and found == sorted(found)
    assert isotonic(sorted(values), weights[: len(values)]) == pytest.approx(sorted(values))
    total = sum(v * w for v, w in zip(values, weights, strict=False))
    assert sum(v * w for v, w in zip(found, weights, strict=False)) == pytest.approx(total)


def test_passes_are_priced_one_by_one_or_together() -> None:
    """Past the end of the table as well."""
    cost = LiveCost(StepTimes((1, 8, 16, 32), (0.010, 0.011, 0.013, 0.018), key_s=1e-7), block=4, largest=24)
    for i in range(100):
        cost.observe(1 + i % 24, 500, 1, 0.01 + 0.0007 * (i % 24))
    view = cost.view([300, 17])
    for rows, count in ((1, 40), (20, 3), (24, 1), (25, 6), (7, 0)):
        assert view.passes_s(rows, count) == [view.pass_s(r) for r in range(rows, rows + count)]
    each = [(1, 300), (4, 17), (5, 4096)]
    assert cost.all_keys(*zip(*each, strict=True)) == sum(cost.keys(*one) for one in each)


@given(st.dictionaries(st.integers(0, 15), st.floats(-0.4, 0.4), min_size=1))
def test_steps_never_visited_take_the_errors_of_their_neighbours(errors: dict[int, float]) -> None:
    """Beyond the first and the last known step, the errors of those."""
    cost = LiveCost(StepTimes((1, 64), (1.0, 1e4)), block=4, largest=64)
    seed = list(cost._table)
    for step, error in errors.items():
        cost._error[step], cost._visits[step] = error, 1.0
    cost._rebuild()
    known, values = sorted(errors), []
    for i in range(16):
        low = max((k for k in known if k <= i), default=known[0])
        high = min((k for k in known if k >= i), default=known[-1])
        share = (i - low) / (high - low) if high > low else 0.0
        values.append(seed[i] * math.exp(errors[low] + share * (errors[high] - errors[low])))
    assert cost._table == pytest.approx(isotonic(values, [cost._visits[i] or 0.25 for i in range(16)]))


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.25, 40.0)), min_size=1, max_size=12),
)
def test_isotonic_is_the_min_max_of_means(points: list[tuple[float, float]]) -> None:
    """Slow twin: at each place the greatest, over starts, of the least, over ends, weighted mean."""

    def mean(low: int, high: int) -> float:
        return sum(v * w for v, w in points[low:high]) / sum(w for _, w in points[low:high])

    n = len(points)
    slow = [max(min(mean(low, high) for high in range(i + 1, n + 1)) for low in range(i + 1)) for i in range(n)]
    assert isotonic([v for v, _ in points], [w for _, w in points]) == pytest.approx(slow)
