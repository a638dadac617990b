"""Rounds by hindsight against slow obvious twins: every way to place rounds, tried."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_toys import texts

from paceline.plan.hindsight import best_fixed_seconds, fixed_rounds, oracle_rounds, reach, seconds_of
from paceline.plan.probe_file import Drafts, ReplayedText

PLAIN = 1.0
COSTS = {"a": lambda k: 1.0 + 0.04 * k, "b": lambda k: 1.1 + 0.2 * k}


@given(texts(), st.integers(0, 4))
def test_fixed_rounds_cover_the_text_once(text: ReplayedText, length: int) -> None:
    rounds = fixed_rounds(text, "a", length)
    covered = [r.position + j for r in rounds for j in range(r.accepted + 1)]
    assert covered[: text.tokens - 1] == list(range(text.tokens - 1)), "every position once, in order"
    assert len(covered) <= text.tokens, "at most the last draft has no token after it"
    for r in rounds:
        assert r.drafted == min(length, text.drafts["a"].proposed[r.position])
        assert r.accepted == min(r.drafted, text.drafts["a"].matched[r.position])


@given(texts(longest=3, most=7))
def test_the_oracle_is_the_best_of_all_ways(text: ReplayedText) -> None:
    """Twin: every choice of drafter and length, drafted in vain or not, at every position."""

    @cache
    def best(position: int) -> float:
        if position >= text.tokens - 1:
            return 0.0
        found = [PLAIN + best(position + 1)]
        for name, cost in COSTS.items():
            drafts = text.drafts[name]
            for k in range(1, drafts.proposed[position] + 1):
                found.append(cost(k) + best(position + min(k, drafts.matched[position]) + 1))
        return min(found)

    rounds = oracle_rounds(text, PLAIN, COSTS)
    assert seconds_of(rounds, PLAIN, COSTS) == pytest.approx(best(0))
    fixed, name, length = best_fixed_seconds([text], PLAIN, COSTS, 3)
    assert best(0) <= fixed + 1e-9
    ways = [seconds_of(fixed_rounds(text, n, d), PLAIN, COSTS) for n in COSTS for d in range(4)]
    assert fixed == pytest.approx(min(ways)) and (name is None) == (length == 0)


def test_the_oracle_cuts_a_draft_where_a_later_one_reaches_further() -> None:
    """Accepting one draft less lets the next round begin where five match: greed would miss it."""
    matched = (2, 0, 5, 0, 0, 0, 0, 0)
    text = ReplayedText("chat", "1", 0.0, 5, 9, True, False, {"a": Drafts(matched, matched)})
    rounds = oracle_rounds(text, PLAIN, {"a": lambda k: 1.0 + 0.01 * k})
    assert [(r.position, r.accepted) for r in rounds] == [(0, 1), (2, 5)]


def test_reach_counts_by_depth() -> None:
    drafts = Drafts((3, 0, 2, 1), (1, 0, 2, 0))
    tried, kept, offered = reach([drafts], 3)
    assert (tried, kept, offered) == ([3, 2, 0], [2, 1, 0], [3, 2, 1])
