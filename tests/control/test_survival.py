"""`Learner` and `AcceptanceTable` beside their definition, and what they are for."""

from __future__ import annotations

import pytest
from control_twins import SlowLearner, SlowTable
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.control.survival import AcceptanceTable, Learner

chains = st.one_of(
    st.lists(st.none(), max_size=11),
    st.lists(st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.1, 0.9, 0.95, 0.98, 1.0])), max_size=11),
)
lessons = st.tuples(st.integers(0, 3), st.integers(0, 9), chains, st.integers(0, 11), st.booleans())


@given(
    seen=st.lists(lessons, max_size=60), offers=st.lists(chains, max_size=4), floor=st.sampled_from([0.0, 0.02, 0.3])
)
@settings(max_examples=80, deadline=None)
def test_what_is_learnt_is_what_its_definition_says(
    seen: list[tuple[int, int, list[float | None], int, bool]], offers: list[list[float | None]], floor: float
) -> None:
    """Four sequences over one table: two ranges of temperatures, and drafters asked blind and not."""
    table, slow_table = AcceptanceTable(), SlowTable()
    kinds = [(0, False), (0, True), (2, False), (2, True)]
    fast, slow = [Learner(table, *kind) for kind in kinds], [SlowLearner(slow_table, *kind) for kind in kinds]
    for who, first, chain, hits, fades in seen:
        hits = min(hits, len(chain))
        for learner in (fast[who], slow[who]):
            learner.record(first, chain, hits)
            if fades:
                learner.fade(0.9)
    for position in range(9):
        for stated in (None, 0.0, 0.5, 0.93, 1.0):
            for temperatures in (0, 2, 3):
                expected = slow_table.estimate(position, stated, temperatures)
                assert table.estimate(position, stated, temperatures) == pytest.approx(expected, rel=1e-12)
            for one, twin in zip(fast, slow, strict=True):
                assert one.acceptance(position, stated) == pytest.approx(twin.acceptance(position, stated), rel=1e-9)
    for one, twin in zip(fast, slow, strict=True):
        for chain in [*offers, [None] * 11]:
            expected = twin.survival(chain, floor)
            if all(abs(chance - floor) > 1e-9 for chance in twin.survival(chain, 0.0)):
                assert one.survival(chain, floor) == pytest.approx(expected, rel=1e-9)
        assert one.survival_unstated(11) == pytest.approx(one.survival([None] * 11), rel=1e-12)
        hopes = one.hopeful(11, 0)
        assert all(hope >= min(chance, 0.98**11) for hope, chance in zip(hopes, one.survival_unstated(11), strict=True))


def test_an_overconfident_drafter_is_corrected() -> None:
    learner = Learner(AcceptanceTable())
    for i in range(200):
        learner.record(0, [0.95], i % 10 < 3)
    assert learner.survival([0.95])[0] == pytest.approx(0.3, abs=0.1)


def test_a_sequence_departs_from_the_others_within_a_few_rounds() -> None:
    table = AcceptanceTable()
    for i in range(400):
        table.record(0, 0.8, i % 10 < 8)
    learner = Learner(table)
    for _ in range(12):
        learner.record(0, [0.8], 0)
    assert learner.survival([0.8])[0] < 0.4
    assert Learner(table).survival([0.8])[0] > 0.7


def test_confidences_that_are_right_still_tell_of_the_drafts_to_come() -> None:
    """A text that the drafter finds hard, and says so: no news for drafts of known confidence, but for the next."""
    table = AcceptanceTable()
    for i in range(400):
        table.record(0, 0.9, i % 10 < 9)
        table.record(0, None, i % 10 < 9)
    learner = Learner(table)
    for i in range(30):
        learner.record(0, [0.1], i % 10 < 1)
    assert learner.survival([0.9])[0] == pytest.approx(0.9, abs=0.05)
    assert learner.survival_unstated(1)[0] < 0.3
    assert learner.survival_unstated(9) == pytest.approx(learner.survival([None] * 9))


def test_temperatures_are_kept_apart_and_start_from_each_other() -> None:
    table = AcceptanceTable()
    for _ in range(200):
        table.record(0, 0.9, True, temperatures=0)
        table.record(0, 0.9, False, temperatures=3)
    assert table.estimate(0, 0.9, 0) > 0.9 and table.estimate(0, 0.9, 3) < 0.1
    assert 0.3 < table.estimate(0, 0.9, 1) < 0.7, "never seen: what is known of all"
