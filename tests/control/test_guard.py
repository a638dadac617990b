"""`Guard` over made-up rounds: what it costs where drafting loses, and that it keeps away where drafting pays."""

from __future__ import annotations

import random

import pytest

from paceline.plan.control.guard import FEWEST, Guard

SEQUENCES, PLAIN_S = 16, 0.012


def play(
    guard: Guard,
    rounds: int,
    tokens: float,
    took: float,
    books: float | None = None,
    count: int = SEQUENCES,
    seed: int = 0,
) -> list[bool]:
    """Rounds that may draft take `took` plain ones and bring each sequence `tokens`, on average; the books say that
    `books` was gained, the truth where it is None. Whether each drafted."""
    chance, drafted = random.Random(seed), []
    for _ in range(rounds):
        drafted.append(guard.is_open(count))
        noise = chance.gauss(1.0, 0.03)
        if drafted[-1]:
            emitted = [1 + (chance.random() < tokens - 1.0) for _ in range(count)]
            gain = sum(emitted) / count - took if books is None else books
            guard.add(emitted, took * noise * PLAIN_S, PLAIN_S, gain)
        else:
            guard.add([1] * count, noise * PLAIN_S, PLAIN_S, 0.0)
    return drafted


def lost(drafted: list[bool], tokens: float, took: float) -> float:
    """Of the speed of the better way, over the run."""
    seconds = sum(took if d else 1.0 for d in drafted)
    made = sum(tokens if d else 1.0 for d in drafted)
    return 1.0 - made / seconds / max(tokens / took, 1.0)


@pytest.mark.parametrize("books", [None, 0.05])
@pytest.mark.parametrize("took", [1.26, 1.35])
def test_where_drafting_loses_most_rounds_are_plain_whatever_the_books_say(took: float, books: float | None) -> None:
    drafted = play(Guard(), 4000, 1.2, took, books)
    assert lost(drafted, 1.2, took) < 0.01 < lost([True] * 4000, 1.2, took)
    assert sum(drafted[-2000:]) < 400


def test_where_it_pays_by_the_books_no_plain_round_is_run() -> None:
    assert all(play(Guard(), 2000, 1.5, 1.2))


def test_where_it_pays_a_little_looking_costs_little() -> None:
    drafted = play(Guard(), 4000, 1.3, 1.2)
    assert lost(drafted, 1.3, 1.2) < 0.01 and sum(drafted) > 3800


def test_it_comes_back_when_drafting_pays_again() -> None:
    guard = Guard()
    assert not all(play(guard, 1500, 1.2, 1.3)[-300:])
    assert sum(play(guard, 1500, 1.6, 1.2, seed=1)) > 900
    assert all(play(guard, 500, 1.6, 1.2, seed=2))


def test_few_sequences_are_left_alone() -> None:
    guard = Guard()
    assert not all(play(guard, 1000, 1.05, 1.3, count=FEWEST))
    while guard.is_open(FEWEST):
        play(guard, 1, 1.05, 1.3, count=FEWEST)
    assert all(guard.is_open(fewer) for fewer in range(1, FEWEST))


def test_what_comes_after_a_rest_is_tried_at_once() -> None:
    guard = Guard()
    while guard.is_open(SEQUENCES):
        play(guard, 1, 1.2, 1.3)
    play(guard, 20, 1.2, 1.3)
    assert not guard.is_open(SEQUENCES)
    guard.rest()
    assert all(play(guard, 15, 1.2, 1.3))
