"""Schedule, frontier, service level, tree: each beside a slow twin."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan.acceptance import Acceptance, constant_acceptance
from paceline.plan.frontier import break_even, candidate, envelope, service_level
from paceline.plan.mechanisms import Mechanism
from paceline.plan.regret import speed_draws, verdict_of
from paceline.plan.residuals import validated_spread
from paceline.plan.schedule import _merge, make_schedule
from paceline.plan.tree import best_tree, grow_tree, tree_values


def _slow_merge(speeds: np.ndarray, tolerance: float) -> float:
    """Least cost over every non-increasing sequence of lengths."""
    regret = 1 - speeds / speeds.max(axis=1, keepdims=True)
    penalty = np.linspace(1.0, 0.2, len(regret))[:, None] * (regret + 4 * np.maximum(regret - tolerance, 0))
    best = np.inf
    for path in itertools.product(range(speeds.shape[1]), repeat=speeds.shape[0]):
        if all(b <= a for a, b in itertools.pairwise(path)):
            cost = sum(penalty[i, d] for i, d in enumerate(path))
            cost += tolerance * sum(a != b for a, b in itertools.pairwise(path))
            best = min(best, cost)
    return float(best)


@given(
    st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0, 0.1)
)
@settings(max_examples=80, deadline=None)
def test_the_schedule_is_the_best_of_all(rows: list[list[float]], tolerance: float) -> None:
    speeds = np.array(rows)
    weights = np.linspace(1.0, 0.2, len(speeds))
    chosen, regret = _merge(speeds, weights, tolerance)
    assert (np.diff(chosen) <= 0).all()
    penalty = weights * (regret + 4 * np.maximum(regret - tolerance, 0))
    cost = penalty.sum() + tolerance * (np.diff(chosen) != 0).sum()
    assert float(cost) == pytest.approx(_slow_merge(speeds, tolerance), abs=1e-9)


def _candidate(kind: str = "eagle3", rate: float = 0.75, batches=range(1, 257), contexts=(640.0,), **where):
    s = scenario(**where)
    acceptance = None if kind == "none" else constant_acceptance(rate, "test")
    return candidate(
        s, Mechanism(kind), acceptance, list(batches), 0 if kind == "none" else 8, list(contexts)
    )


def test_ranges_cover_every_batch_once_and_lengths_fall() -> None:
    (band,) = make_schedule(_candidate().grid)
    assert band.entries[0].first == 1
    assert band.entries[-1].last == 256
    for a, b in itertools.pairwise(band.entries):
        assert b.first == a.last + 1
        assert b.length < a.length
        assert a.return_below < a.last < a.leave_above
    with pytest.raises(InvalidParameter, match="tolerance"):
        make_schedule(_candidate().grid, tolerance=1.0)


def test_the_regret_of_the_schedule_is_what_it_says() -> None:
    c = _candidate()
    (band,) = make_schedule(c.grid)
    speeds = c.grid.user_tokens_per_s[:, :, 0]
    for e in band.entries:
        rows = slice(e.first - 1, e.last)
        loss = 1 - speeds[rows, e.length] / speeds[rows].max(axis=1)
        assert float(loss.max()) == pytest.approx(e.regret, abs=1e-12)


def test_a_drafter_that_is_never_accepted_is_switched_off() -> None:
    (band,) = make_schedule(_candidate(rate=0.0).grid)
    assert [e.length for e in band.entries] == [0]


def test_a_drafter_that_is_always_accepted_drafts_as_far_as_asked() -> None:
    (band,) = make_schedule(_candidate(rate=1.0, batches=range(1, 5)).grid)
    assert band.entries[0].length == 8


def test_the_frontier_is_what_nothing_beats() -> None:
    found = [_candidate("none", batches=range(1, 40)), _candidate(batches=range(1, 40))]
    spread = validated_spread(found[0].scenario.shape)
    points = envelope(found, spread)
    every = []
    for c in found:
        user, device = c.grid.user_tokens_per_s[:, :, 0], c.grid.device_tokens_per_s[:, :, 0]
        every += [
            (u, v)
            for u, v, ok in zip(user.ravel(), device.ravel(), c.fits[:, :, 0].ravel(), strict=True)
            if ok
        ]
    kept = {(round(p.user.value, 6), round(p.device.value, 6)) for p in points}
    for u, v in every:
        beaten = any(a >= u and b >= v and (a > u or b > v) for a, b in every)
        assert ((round(u, 6), round(v, 6)) in kept) == (not beaten)
    assert all(
        a.user.value > b.user.value and a.device.value < b.device.value for a, b in itertools.pairwise(points)
    )


def test_the_service_level_is_kept_and_the_answer_is_the_best() -> None:
    found = [_candidate("none"), _candidate()]
    spread = validated_spread(found[0].scenario.shape)
    answer = service_level(found, spread, 90.0, None, None)
    best = max(
        float(c.grid.device_tokens_per_s[i, d, 0])
        for c in found for i in range(len(c.grid.batches)) for d in range(len(c.grid.lengths))
        if c.fits[i, d, 0] and c.grid.user_tokens_per_s[i, d, 0] >= 90.0
    )  # fmt: skip
    assert answer.best.device.value == pytest.approx(best)
    assert answer.best.user.value >= 90.0
    assert answer.runner_up is not None
    assert answer.best.device.low < best < answer.best.device.high
    few = service_level(found, spread, None, None, 4)
    assert few.best.batch <= 4


def test_wishes_that_cannot_be_met_say_what_can() -> None:
    found = [_candidate("none")]
    spread = validated_spread(found[0].scenario.shape)
    with pytest.raises(Infeasible, match="the fastest reaches"):
        service_level(found, spread, 1e6, None, None)
    with pytest.raises(Infeasible, match="first token"):
        service_level(found, spread, None, 1e-6, None)


def test_break_even() -> None:
    spread = validated_spread(scenario().shape)
    assert break_even(_candidate(rate=0.0), spread) is None
    c = _candidate("eagle3", 0.35, range(1, 513), hardware="h100")
    estimate = break_even(c, spread)
    assert estimate is not None
    gain = c.grid.speedup[:, 1:, 0].max(axis=1)
    last = int(np.flatnonzero(gain > 1)[-1]) + 1
    assert estimate.value == last
    assert estimate.low <= estimate.value <= estimate.high


def test_regret_and_chance() -> None:
    c = _candidate()
    spread = validated_spread(c.scenario.shape)
    draws = speed_draws(c, 0, 0, spread)
    assert draws.shape == (400, 9)
    np.testing.assert_array_equal(draws, speed_draws(c, 0, 0, spread))
    chances = [verdict_of(c, 0, 0, d, spread)[1] for d in range(9)]
    assert sum(chances) == pytest.approx(1.0)
    assert all(verdict_of(c, 0, 0, d, spread)[0] >= 0 for d in range(9))


ranks = st.lists(st.floats(0.01, 1), min_size=1, max_size=4).map(
    lambda values: [v / max(1.0, sum(values)) for v in sorted(values, reverse=True)]
)


@given(ranks, st.integers(1, 14), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_the_tree_program_and_growth_agree(p: list[float], nodes: int, levels: int) -> None:
    value, parents = grow_tree(p, nodes, levels)
    assert float(tree_values(p, nodes, levels)[nodes, levels]) == pytest.approx(value, abs=1e-9)
    assert len(parents) <= nodes - 1 or nodes == 1
    assert all(parent is None or parent < i for i, parent in enumerate(parents))


def _slow_tree(p: list[float], nodes: int, levels: int) -> float:
    """The recursion itself: how many nodes each child's subtree gets, tried one by one."""
    if nodes <= 1 or levels == 0:
        return 1.0

    def children(rank: int, left: int) -> float:
        if rank == len(p) or left == 0:
            return 0.0
        return max(
            [0.0]
            + [
                p[rank] * _slow_tree(p, n, levels - 1) + children(rank + 1, left - n)
                for n in range(1, left + 1)
            ]
        )

    return 1.0 + children(0, nodes - 1)


@pytest.mark.parametrize("p", [[0.6, 0.2, 0.1], [0.5, 0.5], [0.3, 0.3, 0.3], [0.9]])
def test_the_tree_program_equals_its_recursion(p: list[float]) -> None:
    for nodes, levels in itertools.product((1, 2, 4, 6), (0, 1, 2, 4)):
        assert float(tree_values(p, nodes, levels)[nodes, levels]) == pytest.approx(
            _slow_tree(p, nodes, levels)
        )


def test_trees_shrink_where_verification_costs() -> None:
    free = best_tree([0.6, 0.2, 0.1], 0.0, lambda n: 1.0, 32, 6)
    dear = best_tree([0.6, 0.2, 0.1], 0.1, lambda n: 1.0 + 0.3 * (n - 1), 32, 6)
    none = best_tree([0.1], 1.0, lambda n: float(n), 8, 4)
    assert free.nodes > dear.nodes >= none.nodes == 1
    with pytest.raises(InvalidParameter, match="sum to at most 1"):
        tree_values([0.7, 0.7], 3, 2)
    with pytest.raises(InvalidParameter, match="falling"):
        tree_values([0.2, 0.6], 3, 2)


def test_acceptance_by_context_moves_the_schedule() -> None:
    s = scenario(prompt=512)
    a = Acceptance((0.8,), "t", by_context=((2048.0, (0.8,)), (float("inf"), (0.05,))))
    c = candidate(s, Mechanism("eagle3"), a, list(range(1, 33)), 6, [1000.0, 8000.0])
    short, long = make_schedule(c.grid)
    assert short.length_at(1) > 0
    assert long.length_at(1) == 0
