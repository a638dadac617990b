"""The loop detector against a slow twin, planted loops, and texts that do not loop."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.loops import Loop, LoopRule, distinct_share, find_loop, periodic_end
from paceline.errors import InvalidParameter

ids = st.lists(st.integers(0, 2), max_size=40)


def slow_periodic_end(tokens: list[int], min_repeats: int) -> tuple[int | None, int]:
    """Every period and every length of the end, tried as the definition says."""
    found = [
        (-covered, period)
        for covered in range(1, len(tokens) + 1)
        for period in range(1, covered // min_repeats + 1)
        if all(tokens[i] == tokens[i - period] for i in range(len(tokens) - covered + period, len(tokens)))
    ]
    return (None, 0) if not found else (min(found)[1], -min(found)[0])


@given(ids, st.integers(2, 4))
def test_periods_match_the_slow_twin(tokens: list[int], min_repeats: int) -> None:
    assert periodic_end(tokens, min_repeats) == slow_periodic_end(tokens, min_repeats)


@given(st.integers(1, 40), st.integers(3, 6), st.integers(0, 39), st.integers(0, 2**32))
def test_a_planted_loop_is_found(period: int, repeats: int, cut: int, seed: int) -> None:
    generator = random.Random(seed)
    unit = [generator.randrange(50_000) for _ in range(period)]
    before = [generator.randrange(50_000) for _ in range(30)]
    tokens = before + unit[period - min(cut, period - 1) :] + unit * max(repeats, -(-32 // period))
    loop = find_loop(tokens)
    assert loop is not None and loop.period is not None and period % loop.period == 0
    assert loop.tokens >= 32


@given(st.integers(0, 2**32), st.integers(0, 400))
def test_random_tokens_do_not_loop(seed: int, count: int) -> None:
    """A vocabulary of 1,000: three repeats by chance over 32 tokens have odds below 1e-60."""
    generator = random.Random(seed)
    assert find_loop([generator.randrange(1000) for _ in range(count)]) is None


def test_bounds() -> None:
    unit = list(range(100, 111))
    assert find_loop(unit * 3) == Loop(33, 11)
    assert find_loop([1, *unit * 2, *unit[:8]]) is None  # not three times
    assert find_loop([7] * 31) is None and find_loop([7] * 32) == Loop(32, 1)
    assert find_loop([*unit * 3, 5]) is None  # it went on


def test_few_distinct_ngrams() -> None:
    unit = list(range(16))
    wandering = [t for i in range(10) for t in (*unit, 100 + i)]
    assert distinct_share(wandering, 4) < 0.35
    assert find_loop(wandering) == Loop(len(wandering))
    assert find_loop(wandering[:63]) is None
    assert distinct_share([1, 2], 4) == 1.0


def test_a_rule_without_sense_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="min_repeats is 1"):
        LoopRule(min_repeats=1)
    with pytest.raises(InvalidParameter, match="min_distinct_share"):
        LoopRule(min_distinct_share=2.0)
