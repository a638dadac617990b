"""What a round takes beside its pass, found again from an engine whose clock is made up."""

from __future__ import annotations

import pytest
from toy import ToyModel, hashed

from paceline.bench.pass_timer import PassTimer
from paceline.decode.around import time_around
from paceline.decode.cache import KVCache, Transaction
from paceline.plan.control.cost import Around, LiveCost, StepTimes

TRUE = Around(fixed_s=0.5, sequence_s=0.03, row_s=0.002)
PASS_S = 7.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowReserve(Transaction):
    """Laying out a sequence's rows takes its time; reserving them stands for it."""

    clock: Clock

    def reserve(self, slot: int, rows: int) -> int:
        self.clock.now += TRUE.sequence_s + TRUE.row_s * rows
        return super().reserve(slot, rows)


class SlowCache(KVCache):
    clock: Clock

    def transaction(self) -> Transaction:
        self.clock.now += TRUE.fixed_s
        opened = super().transaction()
        opened.__class__ = SlowReserve
        opened.clock = self.clock  # type: ignore[attr-defined]
        return opened


class SlowModel(ToyModel):
    """A pass takes `PASS_S`, what surrounds it `TRUE`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(hashed(16), 16, multiple=1)
        self.clock = clock

    def new_cache(self, slots: int, limit: int) -> KVCache:
        cache = super().new_cache(slots, limit)
        cache.__class__ = SlowCache
        cache.clock = self.clock  # type: ignore[attr-defined]
        return cache

    def forward(self, *given, **named):  # type: ignore[no-untyped-def]
        self.clock.now += PASS_S
        return super().forward(*given, **named)


@pytest.mark.parametrize("sequences", [2, 5])
def test_what_surrounds_a_pass_is_found_by_sequences_and_rows(sequences: int) -> None:
    clock = Clock()
    found = time_around(SlowModel(clock), sequences, clock=clock)
    assert (found.fixed_s, found.sequence_s, found.row_s) == pytest.approx((0.5, 0.03, 0.002))


def test_of_one_sequence_it_is_found_by_rows_alone() -> None:
    clock = Clock()
    found = time_around(SlowModel(clock), 1, clock=clock)
    assert found.sequence_s == 0.0 and found.at(1, 9) == pytest.approx(TRUE.at(1, 9))


def test_a_timed_pass_of_a_target_holds_it_once() -> None:
    clock = Clock()
    timer = PassTimer(SlowModel(clock), [(1, 1, 0), (3, 2, 0)], around=TRUE, clock=clock)
    timer.sweep()
    assert {p.batch: p.median_s for p in timer.times()} == {
        1: pytest.approx(PASS_S + TRUE.at(1, 1)),
        3: pytest.approx(PASS_S + TRUE.at(3, 6)),
    }


def test_the_live_estimate_counts_it_by_sequence() -> None:
    cost = LiveCost(TRUE.beside(StepTimes((1, 64), (PASS_S, PASS_S))))
    for sequences in (1, 4, 8):
        expected = PASS_S + TRUE.at(sequences, 8)
        assert cost.seconds(8, 0, sequences) == pytest.approx(expected)
        assert cost.view([0] * sequences).pass_s(8) == pytest.approx(expected)
        before = cost.at_start(sequences, 100)
        assert before == pytest.approx(cost.seconds(sequences, 100, sequences))
    for _ in range(20):
        cost.observe(8, 0, 8, 3.0 * expected)
    assert cost.at_start(sequences, 100) == before != pytest.approx(cost.seconds(sequences, 100, sequences))
