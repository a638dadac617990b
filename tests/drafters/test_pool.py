"""The pool of finished outputs: whose it is, what enters, what leaves."""

from __future__ import annotations

import pytest
from drafter_toys import Loop, script_target
from hypothesis import given
from hypothesis import strategies as st

from paceline.decode.draft.pool import OutputPool
from paceline.decode.draft.suffix import SuffixDrafter, SuffixOptions
from paceline.errors import InvalidParameter

TEXT = list(range(100, 130))


def finish(drafter: SuffixDrafter, output: list[int], tenant: str = "", key: int = 0) -> None:
    """One request that writes `output` after the prompt [1]."""
    loop = Loop(drafter, script_target(output, 1))
    loop.begin(key, [1], tenant)
    while len(loop.views[key].tokens) <= len(output):
        loop.round([key], 0)
    loop.end(key)


def proposed(drafter: SuffixDrafter, prompt: list[int], tenant: str = "", key: int = 50) -> list[int]:
    loop = Loop(drafter, lambda prefix: 0)
    view = loop.begin(key, prompt, tenant)
    (proposal,) = drafter.propose([view], [4])
    drafter.end(view)
    return list(proposal.tokens)


def test_drafts_from_an_earlier_output() -> None:
    drafter = SuffixDrafter()
    finish(drafter, TEXT)
    assert proposed(drafter, [7, *TEXT[3:11]]) == TEXT[11:15]


def test_nothing_crosses_tenants() -> None:
    drafter = SuffixDrafter()
    finish(drafter, TEXT, tenant="one")
    assert proposed(drafter, TEXT[3:11], tenant="two") == []
    assert proposed(drafter, TEXT[3:11], tenant="one") == TEXT[11:15]


def test_unfinished_requests_and_prompts_are_not_shared() -> None:
    drafter = SuffixDrafter()
    running = Loop(drafter, script_target(TEXT, 12))
    running.begin(1, list(range(200, 212)))
    for _ in range(20):
        running.round([1], 0)
    assert proposed(drafter, TEXT[3:11]) == [], "a running request's output was shared"
    running.end(1)
    assert proposed(drafter, TEXT[3:11]) == TEXT[11:15]
    assert proposed(drafter, list(range(200, 208))) == [], "a prompt was shared"


def test_rejected_drafts_do_not_enter() -> None:
    drafter = SuffixDrafter()
    finish(drafter, TEXT)
    parted = [*TEXT[:10], *range(300, 320)]
    loop = Loop(drafter, script_target(parted, 1))
    view = loop.begin(1, [1])
    while len(view.tokens) <= 20:
        loop.round([1], 4)
    assert loop.drafted > loop.accepted
    loop.end(1)
    assert drafter.pool.num_tokens == len(TEXT) + 20


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=30)), max_size=25),
    st.integers(0, 60),
    st.integers(1, 4),
)
def test_bounds_hold_and_removal_forgets(
    outputs: list[tuple[str, list[int]]], max_tokens: int, max_age: int
) -> None:
    pool = OutputPool(max_tokens, max_age, (2, 4))
    for tenant, output in outputs:
        pool.add(tenant, output)
        assert pool.num_tokens <= max_tokens
        for name in "abc":
            places = pool.places(name, output, len(output), limit=99, max_match=8)
            numbers = {place.document.number for place in places}
            assert not numbers or max(numbers) - min(numbers) < max_age


def test_old_outputs_leave_and_the_fullest_tenant_gives_way() -> None:
    pool = OutputPool(max_tokens=50, max_age=3, levels=(2,))
    for start in (0, 100, 200, 300):
        pool.add("a", list(range(start, start + 10)))
    assert not pool.places("a", [3, 4], 2, 9, 9), "older than the last three"
    assert pool.places("a", [103, 104], 2, 9, 9)
    pool.add("b", list(range(25)))
    assert pool.num_tokens <= 50
    assert pool.places("b", [3, 4], 2, 9, 9), "the small tenant keeps its output"
    assert not pool.places("a", [103, 104], 2, 9, 9)


def test_what_only_loses_is_dropped() -> None:
    """Acceptance must not rot: an output whose suggestions keep missing stops speaking."""
    drafter = SuffixDrafter()
    finish(drafter, [5, 6, 7, *TEXT])
    loop = Loop(drafter, script_target([t for i in range(40) for t in (6, 900 + i)], 1))
    loop.begin(1, [1])
    drafts = [len(loop.round([1], 4)[0]) for _ in range(80)]
    assert any(drafts[:10])
    assert proposed(drafter, [7, *TEXT[3:11]]) == [], "it still speaks"


def test_a_pool_of_nothing_keeps_nothing() -> None:
    drafter = SuffixDrafter(SuffixOptions(max_pool_tokens=0))
    finish(drafter, TEXT)
    assert drafter.pool.num_tokens == 0
    assert proposed(drafter, TEXT[3:11]) == []


@pytest.mark.parametrize(
    "wrong", [{"min_match": 0}, {"max_match": 0}, {"min_token_prob": 1.0}, {"max_pool_tokens": -1}]
)
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        SuffixOptions(**wrong)
