"""The length chooser against all lengths, over costs of any shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.marginal import choose_length, expected_tokens, survival_of

chances = st.floats(0.0, 1.0)
costs = st.lists(st.floats(0.1, 20.0), min_size=13, max_size=13)


def best_by_trying(survival: list[float], cost: list[float], min_gain: float) -> int:
    rates = [(1.0 + sum(survival[:d])) / cost[d] for d in range(len(survival) + 1)]
    paying = [d for d in range(1, len(rates)) if rates[d] > rates[0] * (1.0 + min_gain)]
    top = max((rates[d] for d in paying), default=0.0)
    return next((d for d in paying if rates[d] == top), 0)


@given(st.lists(chances, max_size=12), costs, st.sampled_from([0.0, 0.02, 0.5]))
def test_matches_brute_force_over_any_cost(
    acceptance: list[float], cost: list[float], min_gain: float
) -> None:
    survival = survival_of(acceptance)
    chosen = choose_length(survival, lambda d: cost[d], min_gain)
    rates = [expected_tokens(survival, d) / cost[d] for d in range(len(survival) + 1)]
    wanted = best_by_trying(survival, cost, min_gain)
    assert rates[chosen] == pytest.approx(rates[wanted])
    assert (chosen == 0) == (wanted == 0) or rates[chosen] == pytest.approx(rates[0] * (1.0 + min_gain))


@given(st.lists(chances, max_size=12), st.floats(0.001, 2.0))
def test_on_a_convex_cost_it_is_the_marginal_rule(acceptance: list[float], slope: float) -> None:
    survival = survival_of(acceptance)
    length = 0
    while length < len(survival):
        gain = survival[length] / expected_tokens(survival, length)
        if gain <= slope / (1.0 + slope * length) + 1e-12:
            break
        length += 1
    chosen = choose_length(survival, lambda d: 1.0 + slope * d)

    def rate(d: int) -> float:
        return expected_tokens(survival, d) / (1.0 + slope * d)

    assert rate(chosen) == pytest.approx(rate(length))


def test_looks_past_a_step_that_does_not_pay() -> None:
    """A staircase: the second row costs half a pass, the next six are free."""
    survival = survival_of([0.4] + [0.95] * 7)

    def cost(length: int) -> float:
        return 1.0 if length == 0 else 1.5

    assert expected_tokens(survival, 1) / cost(1) < 1.0
    assert choose_length(survival, cost) == 8


def test_plain_where_nothing_pays_and_without_budget() -> None:
    assert choose_length(survival_of([0.1] * 8), lambda d: 1.0 + 0.2 * d) == 0
    assert choose_length([], lambda d: 1.0) == 0


def test_refuses_a_cost_that_is_not_positive() -> None:
    with pytest.raises(AssertionError, match="draft length 1 is 0"):
        choose_length([0.5], lambda d: 1.0 - d)
