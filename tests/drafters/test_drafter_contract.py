"""The contract of `decode/draft/base.py` over every drafter that needs no model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drafter_toys import Loop, table_target
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.proposal import OneHot, Proposal
from paceline.decode.draft.base import Drafter
from paceline.decode.draft.registry import MODEL_FREE, make_auto

DRAFTERS: dict[str, Callable[[], Drafter]] = {**MODEL_FREE, "auto": make_auto}

tables = st.lists(st.integers(0, 4), min_size=5, max_size=25)
prompts = st.lists(st.integers(0, 4), min_size=1, max_size=30)
# (what, sequence, budget): 0 begin or end, 1 a round, 2 a round in which it is not asked
events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=40)


@pytest.mark.parametrize("name", DRAFTERS)
class TestContract:
    def test_is_a_drafter(self, name: str) -> None:
        drafter = DRAFTERS[name]()
        assert isinstance(drafter, Drafter)
        assert drafter.name == name
        assert not drafter.needs.own_kv and not drafter.needs.hidden_layers and not drafter.needs.tokenizer

    @settings(max_examples=60, deadline=None)
    @given(table=tables, texts=st.lists(prompts, min_size=4, max_size=4), what=events)
    def test_any_interleaving_of_sequences(
        self, name: str, table: list[int], texts: list[list[int]], what: list[tuple[int, int, int]]
    ) -> None:
        """Within budget, answers repeat, ids were seen before, idle is clean (checked in `Loop` and here)."""
        drafter = DRAFTERS[name]()
        loop = Loop(drafter, table_target(table))
        seen: set[int] = set()
        for kind, key, budget in what:
            if kind == 0 and key in loop.views:
                loop.end(key)
            elif kind == 0:
                seen |= set(loop.begin(key, texts[key]).tokens)
            elif loop.views:
                keys = sorted(loop.views)[key % len(loop.views) :]
                for proposal in loop.round(keys, budget, asked=kind == 1):
                    assert set(proposal.tokens) <= seen, "an id that never was in any text"
                    assert proposal.distribution == OneHot()
                    assert len(proposal) == 0 or proposal.drafter in DRAFTERS
                seen |= {token for view in loop.views.values() for token in view.tokens}
        for key in sorted(loop.views):
            loop.end(key)
        drafter.check_idle()

    @pytest.mark.parametrize("index", range(8))
    def test_rejection_at_every_index(self, name: str, index: int) -> None:
        """The text repeats and then parts from every copy: inside the draft, at `index` of it."""
        period = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
        loop = Loop(DRAFTERS[name](), lambda prefix: period[len(prefix) % 12])
        view = loop.begin(0, period * 3)
        while len(view.tokens) < 60:
            loop.round([0], 1)
        parting = len(view.tokens) + index
        loop.target = lambda prefix: 99 if len(prefix) == parting else period[len(prefix) % 12]
        (proposal,) = loop.round([0], 8)
        assert len(proposal) == 8
        assert len(view.tokens) == parting + 1 and view.tokens[-1] == 99
        for _ in range(12):
            loop.round([0], 8)
        assert loop.round([0], 8)[0].tokens, "after the parting the loop is drafted again"
        loop.end(0)
        loop.drafter.check_idle()

    @pytest.mark.parametrize("period", [1, 2, 3, 7, 12])
    def test_a_loop_is_drafted_at_full_budget(self, name: str, period: int) -> None:
        loop = Loop(DRAFTERS[name](), lambda prefix: len(prefix) % period)
        loop.begin(0, [i % period for i in range(40)])
        for budget in (1, 4, 16):
            (proposal,) = loop.round([0], budget)
            assert len(proposal) == budget
        assert loop.accepted == loop.drafted

    def test_no_budget_no_draft(self, name: str) -> None:
        loop = Loop(DRAFTERS[name](), lambda prefix: 1)
        loop.begin(0, [1] * 20)
        assert loop.round([0], 0) == [Proposal()]

    def test_fresh_text_is_not_drafted(self, name: str) -> None:
        loop = Loop(DRAFTERS[name](), len)
        loop.begin(0, list(range(50)))
        for _ in range(30):
            assert loop.round([0], 8) == [Proposal()]

    def test_idle_check_names_what_is_held(self, name: str) -> None:
        drafter = DRAFTERS[name]()
        loop = Loop(drafter, lambda prefix: 1)
        loop.begin(7, [1, 2, 3])
        with pytest.raises(AssertionError, match="7"):
            drafter.check_idle()
        loop.end(7)
        drafter.check_idle()


@pytest.mark.parametrize("name", MODEL_FREE)
@settings(max_examples=25, deadline=None)
@given(table=tables, prompt=prompts, quiet=st.lists(st.booleans(), min_size=12, max_size=12))
def test_rounds_not_asked_lose_nothing(
    name: str, table: list[int], prompt: list[int], quiet: list[bool]
) -> None:
    """However a text was committed, the same is proposed after it (`auto` learns from what it was asked)."""
    loop, plain = Loop(DRAFTERS[name](), table_target(table)), Loop(DRAFTERS[name](), table_target(table))
    view, other = loop.begin(0, prompt), plain.begin(0, prompt)
    for unasked in quiet:
        loop.round([0], 6, asked=not unasked)
    while len(other.tokens) < len(view.tokens):
        plain.round([0], 0)
    assert other.tokens == view.tokens
    assert loop.drafter.propose([view], [6]) == plain.drafter.propose([other], [6])
