"""`choose_lengths` beside the enumeration of everything it could have chosen."""

from __future__ import annotations

import itertools
import operator
import random

import pytest
from control_twins import Formula, best_by_enumeration, rate_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.control.lengths import Contender, Load, Option, Pick, choose_free, choose_lengths


def survival_of(acceptance: list[float]) -> list[float]:
    """Running products of the conditional acceptance by position."""
    return list(itertools.accumulate(acceptance, operator.mul))


chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(survival_of)
free = chances.map(Option)
rises = st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24)
steps = rises.map(lambda found: list(itertools.accumulate(found, initial=1.0)))
loads = st.builds(Load, rows=st.integers(0, 4), tokens=st.floats(0.0, 4.0))


def staircase(table: list[float]) -> Formula:
    return Formula(lambda rows: table[min(rows, len(table)) - 1])


@settings(max_examples=150, deadline=None)
@given(options=st.lists(free, max_size=3), table=steps, load=loads)
def test_one_sequence_is_solved_exactly(options: list[Option], table: list[float], load: Load) -> None:
    state, cost = [Contender(tuple(options))], staircase(table)
    plan = choose_lengths(state, cost, load)
    assert plan.rate == pytest.approx(best_by_enumeration(state, cost, load))
    assert plan.rate == pytest.approx(rate_of(state, plan.picks, cost, load)), "what it says is not what it picked"


@settings(max_examples=150, deadline=None)
@given(options=st.lists(free, min_size=2, max_size=4), table=steps, load=loads)
def test_a_batch_with_one_free_drafter_is_solved_exactly_over_any_cost(
    options: list[Option], table: list[float], load: Load
) -> None:
    """The optimum over rows alone: sorted survival, looked at to its end, whatever steps the cost has."""
    state, cost = [Contender((option,)) for option in options], staircase(table)
    plan = choose_lengths(state, cost, load)
    assert plan.rate == pytest.approx(best_by_enumeration(state, cost, load))
    assert plan.rate == pytest.approx(rate_of(state, plan.picks, cost, load))


@settings(max_examples=150, deadline=None)
@given(
    offers=st.lists(st.one_of(st.just([]), chances), min_size=1, max_size=6),
    table=steps,
    load=loads,
    block=st.integers(1, 4),
    block_s=st.floats(0.0, 0.5),
    min_gain=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_free_drafters_alone_are_chosen_for_alike(
    offers: list[list[float]], table: list[float], load: Load, block: int, block_s: float, min_gain: float
) -> None:
    cost = Formula(lambda rows: table[min(rows, len(table)) - 1], block=block)
    blocks_s = [block_s * (1 + i) for i in range(len(offers))]
    state = [Contender((Option(s),) if s else (), b) for s, b in zip(offers, blocks_s, strict=True)]
    expected = choose_lengths(state, cost, load, min_gain)
    lengths, plan = choose_free(offers, blocks_s, cost, load, min_gain)
    assert lengths == [pick.length for pick in expected.picks]
    assert plan[1:] == expected[1:]


def test_a_costly_drafter_alone_is_weighed_exactly() -> None:
    generator = random.Random(3)
    for _ in range(200):
        survival = survival_of([generator.random() for _ in range(6)])
        step, row = generator.random() * 0.5, generator.random() * 0.2
        entry = generator.random() * 0.5
        cost = Formula(lambda rows, row=row: 1.0 + row * (rows - 1), {0: lambda n, step=step: step}, block=4)
        state = [Contender((Option(survival, 0, entry), Option(survival[:2])), block_s=0.1)]
        plan = choose_lengths(state, cost, Load())
        assert plan.rate == pytest.approx(best_by_enumeration(state, cost, Load()))


def test_batches_with_several_drafters_come_near_the_best() -> None:
    """No promise of the optimum here: of 300 batches the worst is within 6 %, the mean within 0.5 %."""
    generator, worst, total = random.Random(4), 1.0, 0.0
    for _ in range(300):
        state = []
        for _ in range(generator.randint(2, 3)):
            options = [Option(survival_of([generator.random() ** 0.5 for _ in range(generator.randint(1, 3))]))]
            if generator.random() < 0.7:
                acceptance = [generator.random() ** 0.3 for _ in range(3)]
                options.append(Option(survival_of(acceptance), 0, generator.random() * 0.1))
            state.append(Contender(tuple(options), block_s=0.05))
        a, b, row = generator.random() * 0.4, generator.random() * 0.1, generator.random() * 0.15
        cost = Formula(
            lambda rows, row=row: 1.0 + row * (rows - 1) + 0.2 * (rows > 6),
            {0: lambda n, a=a, b=b: a + b * n},
            block=2,
        )
        plan = choose_lengths(state, cost, Load())
        best = best_by_enumeration(state, cost, Load())
        assert plan.rate == pytest.approx(rate_of(state, plan.picks, cost, Load()))
        worst, total = min(worst, plan.rate / best), total + plan.rate / best
    assert worst > 0.94 and total / 300 > 0.995, (worst, total / 300)


@settings(max_examples=100, deadline=None)
@given(survival=chances, slope=st.floats(0.0, 0.5))
def test_where_the_cost_is_convex_it_stops_at_the_first_draft_that_does_not_pay(
    survival: list[float], slope: float
) -> None:
    """The marginal rule: with a convex cost, greedy stopping and looking at every length agree."""

    def seconds(rows: int) -> float:
        return 1.0 + slope * (rows - 1) + 0.02 * (rows - 1) ** 2

    tokens, length = 1.0, 0
    while length < len(survival) and (tokens + survival[length]) / seconds(length + 2) > tokens / seconds(length + 1):
        tokens += survival[length]
        length += 1
    plan = choose_lengths([Contender((Option(survival),))], Formula(seconds), Load())
    assert plan.rate == pytest.approx(tokens / seconds(length + 1))


def test_looks_past_a_step_that_does_not_pay() -> None:
    """Rows 2 to 4 cost as 1; the step to 5 costs much, and 5 to 12 are one price."""
    state = [Contender((Option(survival_of([0.99] * 11)),)), Contender()]
    plan = choose_lengths(state, Formula(lambda rows: 1.0 if rows <= 4 else 1.9), Load())
    assert plan.picks == (Pick(0, 11), Pick())


def test_more_load_never_drafts_deeper() -> None:
    """PL-01: at the same acceptance, the longest draft falls as the batch grows, to 0 where all of them lose."""

    def seconds(rows: int) -> float:
        return 1.0 + 0.002 * rows + 0.03 * max(rows - 32, 0)

    lengths = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        state = [Contender((Option(survival_of([0.6] * 8)),)) for _ in range(batch)]
        lengths.append(max(pick.length for pick in choose_lengths(state, Formula(seconds), Load()).picks))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 8 and lengths[-1] == 0


def test_gain_asked_for_is_against_plain() -> None:
    state = [Contender((Option([0.2]),))]
    cost = Formula(lambda rows: 1.0 + 0.19 * (rows - 1))
    assert choose_lengths(state, cost, Load()).picks[0] == Pick(0, 1)
    assert choose_lengths(state, cost, Load(), min_gain=0.02).picks[0] == Pick()


def test_refuses_nothing_to_choose_for_and_free_passes() -> None:
    with pytest.raises(AssertionError, match="no sequence"):
        choose_lengths([], Formula(lambda rows: 1.0), Load())
    with pytest.raises(AssertionError, match="take time"):
        choose_lengths([Contender()], Formula(lambda rows: 0.0), Load())
