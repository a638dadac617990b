"""The controller in scripted worlds: never behind plain, never far behind the best fixed choice.

Everything is deterministic: acceptance is drawn once from fixed seeds, prices are formulas. The cases of the list:
PL-01 load, PL-02 hovering at a threshold, PL-13 acceptance that comes and goes, PL-14 temperatures.
"""

from __future__ import annotations

import pytest
from worlds import against_plain, best_fixed, controller, drafts, play, prices, text

from paceline.plan.control.offline import Fixed
from paceline.plan.control.records import ControlOptions, RoundFacts

COSTLY, FREE = {0: 0.15}, {}
KINDS = pytest.mark.parametrize("steps", [FREE, COSTLY], ids=["free", "costly"])
NO_TRIALS = ControlOptions(probe_share=0.0)


def phases(at: int) -> float:
    return 0.9 if 500 <= at < 4500 else 0.2


@KINDS
def test_pl_13_comes_back_after_a_bad_stretch(steps: dict[int, float]) -> None:
    world = prices(0.05, steps)
    one = [text({0: drafts(phases, 5500, seed=5)})]
    log = play(one, controller(world, 1), world).rounds
    at, position = [], 0
    for r in log:
        at.append(position)
        position += r.emitted

    def mean_length(low: int, high: int) -> float:
        lengths = [r.drafted for r, p in zip(log, at, strict=True) if low <= p < high]
        return sum(lengths) / len(lengths)

    low = 0.7 if steps else 1.8  # one free draft pays at 0.2
    assert mean_length(100, 500) < low
    rounds = [i for i, p in enumerate(at) if p >= 500]
    back = next(i for i in rounds if all(r.drafted >= 3 for r in log[i : i + 5]))
    assert back - rounds[0] < 200
    assert mean_length(1500, 4500) > 4.5, "and it stays"
    fall = [i for i, p in enumerate(at) if p >= 4500]
    assert sum(r.drafted for r in log[fall[0] + 50 :]) / len(log[fall[0] + 50 :]) < low
    quiet = [r for r, p in zip(log, at, strict=True) if 50 <= p < 500]
    assert sum(r.seconds for r in quiet) < 1.03 * sum(r.plain_s * r.emitted for r in quiet)


def test_pl_13_fault_without_trials_a_costly_drafter_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: no trials, and nothing is forgotten of a sequence while it is not seen."""
    monkeypatch.setattr("paceline.plan.control.controller._UNSEEN_FADE", 1.0)
    world = prices(0.05, COSTLY)
    one = [text({0: drafts(phases, 3000, seed=5)})]
    log = play(one, controller(world, 1, NO_TRIALS), world).rounds
    assert sum(r.drafted > 0 for r in log[300:]) < 5


@KINDS
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.97])
def test_steady_acceptance_is_near_the_best_fixed_length(steps: dict[int, float], acceptance: float) -> None:
    world = prices(0.04, steps)
    texts = [text({0: drafts(lambda _: acceptance, 400, seed=s)}) for s in range(6)]
    speed = against_plain(texts, controller(world, 1), world)
    assert speed > 0.98
    assert speed > 0.91 * best_fixed(texts, world, 1)  # furthest off where the best gains 8 %; else 0.97 and more


@KINDS
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_pl_01_load_ramps(steps: dict[int, float], batch: int) -> None:
    """Past 24 rows the machine is compute bound; texts that copy well among texts that do not."""
    world = prices(0.01, steps, knee=24, steep=0.06)
    texts = [text({0: drafts(lambda _, a=a: a, 200, seed=s)}) for s, a in enumerate([0.3, 0.8] * 16)]
    speed = against_plain(texts, controller(world, 1), world, batch)
    assert speed > 0.98
    assert speed > 0.96 * best_fixed(texts, world, 1, batch)


def test_pl_01_deeper_at_low_load() -> None:
    world = prices(0.01, knee=24, steep=0.06)
    lengths = []
    for batch in (1, 4, 16, 32):
        texts = [text({0: drafts(lambda _: 0.7, 150, seed=s)}) for s in range(32)]
        log = play(texts, controller(world, 1), world, batch).rounds[20:]
        lengths.append(sum(r.drafted for r in log) / sum(r.batch for r in log))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 4 and lengths[-1] < 0.3


@KINDS
def test_pl_02_hovering_at_a_threshold(steps: dict[int, float]) -> None:
    """Up to 4 sequences drafting pays, with 5 it does not; the batch swings between 4 and 5 all the time."""
    world = prices(0.005, steps, knee=16, steep=0.12)
    texts = [
        text({0: drafts(lambda _: 0.75, 160, seed=s)}, arrives=150 * (s - 4) if s > 4 else 0) for s in range(24)
    ]
    speed = against_plain(texts, controller(world, 1), world, batch=5)
    static = [1.0 / against_plain(texts, Fixed(0, 2, not steps), world, 5), 1.0]
    assert speed > 0.98
    assert speed > 0.97 / min(static)
    assert speed > 0.96 * best_fixed(texts, world, 1, batch=5)


@KINDS
def test_pl_14_mixed_temperatures_in_one_batch(steps: dict[int, float]) -> None:
    """At temperature 0 drafts come true, at 1 fewer than 1 % do; half of the batch each."""
    world = prices(0.04, steps)
    texts = [
        text({0: drafts(lambda _, t=t: 0.008 if t else 0.85, 250, seed=t + 2 * s)}, temperature=float(t))
        for s in range(8)
        for t in (0, 1)
    ]
    hot, cold = [t for t in texts if t.temperature], [t for t in texts if not t.temperature]
    policy = controller(world, 1)
    assert play(cold, policy, world, 4).tokens == 8 * 250
    assert against_plain(hot, policy, world, 4) > 0.98, "hot requests pay for what was learnt on cold ones"
    assert against_plain(texts, policy, world, 4) > (1.05 if steps else 1.35)
    assert policy.tables[0].estimate(0, None, 3) < 0.1 and policy.tables[0].estimate(0, None, 0) > 0.75


def test_a_costly_drafter_is_not_tried_where_a_free_one_does_the_work() -> None:
    """Code edits: the matcher is right nearly always, a draft model well; its prompt is long to read."""
    world = prices(0.03, {1: 0.4})
    texts = [
        text(
            {
                0: drafts(lambda _: 0.97, 200, seed=s, confidence=0.9, speaks=lambda i: float(i % 40 < 32)),
                1: drafts(lambda _: 0.6, 200, seed=50 + s),
            },
            prompt=180,
        )
        for s in range(12)
    ]
    alone = [text({0: t.drafts[0]}, prompt=180) for t in texts]
    assert against_plain(texts, controller(world, 2), world) > 0.97 * against_plain(alone, controller(world, 1), world)


def test_of_two_the_one_that_suits_the_text() -> None:
    """Half of the texts copy, half are prose that only the draft model knows."""
    world = prices(0.03, {1: 0.1})
    texts = [
        text(
            {
                0: drafts(lambda _, c=c: 0.95 if c else 0.1, 300, seed=s, confidence=0.7),
                1: drafts(lambda _: 0.8, 300, seed=90 + s),
            }
        )
        for s, c in enumerate([True, False] * 6)
    ]
    speed = against_plain(texts, controller(world, 2), world)
    assert speed > 1.05 * best_fixed(texts, world, 2), "choosing per text must beat every fixed setting"


@pytest.mark.parametrize("seed_error", [0.2, 5.0])
def test_a_wrong_seed_is_put_right(seed_error: float) -> None:
    """Rows seeded five times too cheap or too dear."""
    world = prices(0.06)
    texts = [text({0: drafts(lambda _: 0.6, 400, seed=s)}) for s in range(8)]
    speed = against_plain(texts, controller(world, 1, seed_error=seed_error), world)
    assert speed > 0.94 * best_fixed(texts, world, 1)


def test_a_machine_that_slows_down_changes_nothing() -> None:
    texts = [text({0: drafts(lambda _: 0.7, 500, seed=s)}) for s in range(4)]
    calm = prices(0.04)
    rough = prices(0.04, slow=lambda i: (3.0 if i % 200 > 120 else 1.0) * (40.0 if i % 97 == 0 else 1.0))
    calm_log, log = play(texts, controller(calm, 1), calm), play(texts, controller(rough, 1), rough)
    drafted = [sum(r.drafted for r in t.rounds) / len(t.rounds) for t in (calm_log, log)]
    assert drafted[1] == pytest.approx(drafted[0], rel=0.12)


def test_plain_rounds_measured_on_purpose_are_few() -> None:
    world = prices(0.02)
    texts = [text({0: drafts(lambda _: 0.9, 4000, seed=1)})]
    log = play(texts, controller(world, 1), world).rounds
    plain = [r for r in log[100:] if not r.drafted]
    assert 1 <= len(plain) <= 0.01 * len(log)


@pytest.mark.parametrize("batch", [1, 3])
def test_time_saved_is_what_was_saved(batch: int) -> None:
    """Also where texts draft differently well, so that others share a round than would without drafting."""
    for acceptance, steps in ((0.8, FREE), (0.8, COSTLY), (0.3, FREE)):
        world = prices(0.04, steps)
        texts = [text({0: drafts(lambda _, a=acceptance, s=s: a * (0.4 + 0.2 * s), 300, seed=s)}) for s in range(4)]
        policy = controller(world, 1)
        log = play(texts, policy, world, batch)
        saved = play(texts, Fixed(None, 0), world, batch).seconds - log.seconds
        assert policy.ledger.saved_s == pytest.approx(saved, rel=0.05, abs=0.01 * log.seconds)


def test_rounds_that_read_prompts_are_booked_for_what_they_cost_more() -> None:
    """Plain decoding too would have had a token of each sequence beside the prompt."""
    policy = controller(prices(0.04), 1)
    policy.begin(0)
    policy.settle(RoundFacts([], 0, [], [], [], draft_s=0.2, whole_s=30.0, prefill=True))
    assert policy.ledger.saved_s == pytest.approx(-0.2), "what drafters took to begin"
    policy.settle(RoundFacts([0], 4, [4], [100], [3], draft_s=0.1, whole_s=40.0, prefill=True))
    assert policy.ledger.saved_s == pytest.approx(-0.2 + 2 * 1.0 - 3 * 0.04 - 0.1), "two tokens, three rows"


def test_a_useless_drafter_raises_an_alarm_once() -> None:
    world = prices(0.04, COSTLY)
    bad = [text({0: drafts(lambda _: 0.01, 3000, seed=s)}) for s in range(6)]
    policy = controller(world, 1, ControlOptions(probe_share=0.05))
    play(bad, policy, world)
    (alarm,) = policy.ledger.alarms
    assert alarm.drafter == "d0" and alarm.acceptance < 0.1 and "of no use" in str(alarm)
    good = controller(world, 1)
    play([text({0: drafts(lambda _: 0.5, 2000, seed=1)})], good, world)
    assert good.ledger.alarms == []
