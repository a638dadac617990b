"""`PlainShadow` beside a plain engine run token by token, whatever order the drafting one emits in."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.shadow import PlainShadow

CONTEXT = 40


def cost_of() -> LiveCost:
    return LiveCost(StepTimes((1, 2, 16), (1.0, 1.3, 4.0), key_s=1e-4), largest=16)


def plainly(tokens: list[int], places: int, cost: LiveCost) -> float:
    """Seconds of rounds in which every running sequence emits a token; the next waits for a free place."""
    waiting, running, seconds = deque(tokens), [], 0.0
    while waiting or running:
        while waiting and len(running) < places:
            running.append([0, waiting.popleft()])
        seconds += cost.seconds(len(running), sum(cost.keys(1, CONTEXT + done) for done, _ in running), len(running))
        running = [[done + 1, left - 1] for done, left in running if left > 1]
    return seconds


@given(
    rates=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=7),
    places=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_it_takes_what_plain_decoding_of_the_same_tokens_would(
    rates: list[list[int]], places: int, data: st.DataObject
) -> None:
    cost = cost_of()
    shadow, waiting, running, at = PlainShadow(cost), deque(enumerate(rates)), {}, {}
    while waiting or running:
        while waiting and len(running) < places:
            key, emits = waiting.popleft()
            running[key], at[key] = deque(emits), CONTEXT
        emitted = {key: emits.popleft() for key, emits in running.items()}
        shadow.add(list(running), [at[key] for key in running], list(emitted.values()))
        at = {key: at[key] + emitted.get(key, 0) for key in at}
        running = {key: emits for key, emits in running.items() if emits}
        if data.draw(st.booleans()):
            assert shadow.seconds <= plainly([sum(r) for r in rates], places, cost) * 1.002
    took = plainly([sum(r) for r in rates], min(places, len(rates)), cost)
    assert shadow.seconds == pytest.approx(took, rel=2e-3), "contexts are taken at the middle of several rounds"
    assert shadow.seconds == shadow.seconds, "asking changes nothing"


def test_a_fast_sequence_does_not_make_the_slow_ones_look_dear() -> None:
    """One of two ends at once: alone, a plain round of the other would cost more by token than beside it."""
    cost = cost_of()
    shadow = PlainShadow(cost)
    shadow.add([0, 1], [CONTEXT, CONTEXT], [20, 1])
    for round_index in range(19):
        shadow.add([1], [CONTEXT + 1 + round_index], [1])
    assert shadow.seconds == pytest.approx(plainly([20, 20], 2, cost), rel=1e-3)


def test_what_comes_after_a_rest_shares_no_round_with_what_was_before() -> None:
    cost = cost_of()
    shadow, alone = PlainShadow(cost), plainly([9], 1, cost)
    for key in range(4):
        shadow.add([key], [CONTEXT], [9])
    assert shadow.seconds == pytest.approx(4 * alone, rel=1e-3), "one at a time, one place"
    shadow.rest()
    shadow.add([4, 5, 6], [CONTEXT] * 3, [9, 9, 1])
    shadow.rest()
    together = plainly([9, 9, 1], 3, cost)
    for key in (7, 8):
        shadow.add([key], [CONTEXT], [9])
    assert shadow.seconds == pytest.approx(6 * alone + together, rel=2e-3), "and again one"


def test_a_token_beside_a_prompt_is_no_round_of_plain_decoding() -> None:
    cost = cost_of()
    shadow = PlainShadow(cost)
    shadow.add([0, 1], [CONTEXT] * 2, [5, 1], beside_prompt=True)
    shadow.add([0, 1], [CONTEXT] * 2, [1, 5])
    shadow.rest()
    assert shadow.seconds == pytest.approx(plainly([5, 5], 2, cost), rel=2e-3)


def test_a_sequence_that_was_away_goes_on() -> None:
    cost = cost_of()
    shadow = PlainShadow(cost)
    for keys in ([0, 1], [0], [0, 1]):
        shadow.add(keys, [CONTEXT] * len(keys), [1] * len(keys))
    assert shadow.seconds == pytest.approx(plainly([3, 2], 2, cost), rel=2e-2)


def test_seconds_are_asked_while_rounds_are_booked() -> None:
    """The server's metrics are read on another thread than the engine's."""
    shadow, over, failed = PlainShadow(cost_of()), threading.Event(), []

    def ask() -> None:
        last = 0.0
        while not over.is_set():
            try:
                now = shadow.seconds
            except RuntimeError as error:  # the books changed under the reader
                failed.append(str(error))
                return
            if now < last - 1e-6:
                failed.append(f"{now} after {last}")
            last = now

    reader = threading.Thread(target=ask)
    reader.start()
    for turn in range(3000):
        keys = [turn, turn + 1, turn + 2]
        shadow.add(keys, [CONTEXT] * 3, [3, 1, 2])
    over.set()
    reader.join()
    assert not failed
