"""`auto`, the controller's hands: that drafters are asked, watched and scored as the controller wants it.

What it chooses in long worlds is tested in `tests/control`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from drafter_toys import Loop

from paceline.core.proposal import Proposal, Verdict
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.auto import AutoDrafter, Candidate, mild_cost
from paceline.decode.draft.base import Needs, SequenceView
from paceline.errors import InvalidParameter
from paceline.plan.control.cost import StepTimes
from paceline.plan.control.records import Choice, RoundFacts
from paceline.plan.control.survival import AcceptanceTable


class Scripted:
    """Says the right token at each position with the chance given for it; wrong ones are negative."""

    needs = Needs()

    def __init__(self, name: str, chances: list[float], confidence: float | None = None) -> None:
        self.name, self.confidence, self.asked = name, confidence, 0
        noise = random.Random(5)
        self.right = [noise.random() < chance for chance in chances]

    def begin(self, view: SequenceView) -> None: ...

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        self.asked += 1
        return [self._chain(len(view.tokens), budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, at: int, budget: int) -> Proposal:
        tokens = [i if self.right[i] else -1 for i in range(at, at + budget)]
        stated = None if self.confidence is None else (self.confidence,) * budget
        return Proposal.chain(tokens, self.name, confidence=stated)

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None: ...

    def end(self, view: SequenceView) -> None: ...

    def check_idle(self) -> None: ...


ROW = 0.1


def costly(drafter: Scripted, step_s: float) -> Candidate:
    """Reading a token costs a fortieth of a step."""
    return Candidate(drafter, StepTimes((1, 41), (step_s, 2.0 * step_s)))


def auto_over(*candidates: Candidate, row: float = ROW) -> AutoDrafter:
    return AutoDrafter(candidates, mild_cost(row), clock=lambda: 0.0)


def run(auto: AutoDrafter, until: int, budget: int = 8, step_s: float = 0.0) -> tuple[list[Proposal], list[int]]:
    """Rounds of a target whose token at position i is i, until `until` tokens; proposals, positions."""
    loop = Loop(auto, len)
    view = loop.begin(0, [0])
    view.params = SamplingParams(max_tokens=None)
    proposals, at = [], []
    while len(view.tokens) < until:
        at.append(len(view.tokens))
        (proposal,) = loop.round([0], budget)
        proposals.append(proposal)
        rows, drafting = 1 + len(proposal), step_s * len(proposal) if proposal.drafter != "free" else 0.0
        whole = 1.0 + ROW * (rows - 1) + drafting
        auto.settle(RoundFacts([0], rows, [rows], [at[-1]], [len(view.tokens) - at[-1]], drafting, whole))
    loop.end(0)
    auto.check_idle()
    return proposals, at


def rate(proposals: list[Proposal], at: list[int], until: int, step_s: float) -> float:
    """Tokens per cost, 1 is plain decoding."""
    cost = sum(1.0 + (ROW + step_s) * len(p) for p in proposals)
    return (until - at[0]) / cost


@pytest.mark.parametrize("step_s", [0.0, 0.15])
def test_pl_13_comes_back_after_a_bad_stretch(step_s: float) -> None:
    """Acceptance 0.05, then 0.9, then 0.05: the length falls, comes back within 200 rounds, falls again."""
    chances = [0.05] * 600 + [0.9] * 2400 + [0.05] * 2000
    drafter = Scripted("x", chances)
    auto = auto_over(costly(drafter, step_s) if step_s else Candidate(drafter))
    proposals, at = run(auto, 4000, step_s=step_s)

    def mean_length(low: int, high: int) -> float:
        lengths = [len(p) for p, position in zip(proposals, at, strict=True) if low <= position < high]
        return sum(lengths) / len(lengths)

    assert mean_length(100, 600) < 0.5
    assert mean_length(1000, 3000) > 3.0
    rounds = [i for i, position in enumerate(at) if position >= 600]
    back = next(i for i in rounds if all(len(p) >= 2 for p in proposals[i : i + 3]))
    assert back - rounds[0] < 200
    assert mean_length(3100, 3900) < 0.5


@pytest.mark.parametrize("step_s", [0.0, 0.3])
def test_a_drafter_that_is_always_wrong_costs_little(step_s: float) -> None:
    drafter = Scripted("x", [0.0] * 3000)
    auto = auto_over(costly(drafter, step_s) if step_s else Candidate(drafter))
    proposals, at = run(auto, 2000, step_s=step_s)
    assert rate(proposals[50:], at[50:], 2000, step_s) > 0.98
    assert rate(proposals, at, 2000, step_s) > 0.975
    assert any(map(len, proposals[1000:])) == (step_s > 0), "the costly one is tried again, the free one need not be"


def test_a_drafter_that_is_always_right_is_used_to_the_full() -> None:
    auto = auto_over(costly(Scripted("x", [1.0] * 3000), 0.1))
    proposals, _ = run(auto, 2000, step_s=0.1)
    lengths = [len(p) for p in proposals[60:-1]]
    assert set(lengths) <= {0, 8} and lengths.count(0) <= 5, "but for plain rounds taken to measure them"


def test_takes_the_better_of_two_and_names_it() -> None:
    good, bad = Scripted("good", [0.8] * 3000), Scripted("bad", [0.3] * 3000)
    proposals, _ = run(auto_over(Candidate(bad), Candidate(good)), 2000)
    names = [p.drafter for p in proposals[50:] if len(p)]
    assert names.count("good") > 0.9 * len(names)


def test_free_but_poor_or_dear_but_good_is_a_matter_of_price() -> None:
    for step_s, winner in ((0.02, "model"), (1.5, "free")):
        free = Candidate(Scripted("free", [0.5] * 3000, 0.5))
        auto = auto_over(free, costly(Scripted("model", [0.9] * 3000), step_s))
        proposals, _ = run(auto, 2000, step_s=step_s)
        names = [p.drafter for p in proposals[100:] if len(p)]
        assert names.count(winner) > 0.8 * len(names), (step_s, winner)


def test_a_free_drafter_is_learnt_while_it_is_not_used() -> None:
    """Its drafts are held against several plain rounds, so later positions are known as well."""
    auto = auto_over(Candidate(Scripted("x", [0.9] * 3000, 0.5)), row=5.0)
    loop = Loop(auto, len)
    loop.begin(0, [0])
    for _ in range(1500):
        assert loop.round([0], 8) == [Proposal()], "at this cost nothing pays"
    loop.end(0)
    (table,) = auto.controller.tables
    for position in range(6):
        assert abs(table.estimate(position, 0.5) - 0.9) < 0.1, position
    assert AcceptanceTable().estimate(0, 0.5) == pytest.approx(0.5)


def test_drafts_made_and_not_verified_are_watched_all_the_same() -> None:
    """A model that says of its later drafts that they are bad is cut; that they come true is learnt."""
    auto = auto_over(costly(Scripted("x", [1.0] * 400, 0.05), 0.01))
    run(auto, 300, step_s=0.01)
    assert auto.controller.tables[0].estimate(0, 0.05) > 0.5


def test_a_trial_that_was_broken_off_risked_less() -> None:
    trial = Choice(1, 4, risk_s=2.0, usual=0)
    assert trial.made(4) == trial and trial.made(1) == Choice(1, 1, risk_s=0.5, usual=0)
    assert Choice(1, 2).made(1) == Choice(1, 2), "no trial"


def test_a_batch_is_asked_at_once_and_only_who_is_due() -> None:
    """One sequence never heard anything right, and asking takes long: the other is asked without it."""
    drafter = Scripted("x", [1.0] * 40 + [0.0] * 3000, 0.9)
    asked: list[list[int]] = []
    propose = drafter.propose

    def noted(views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        asked.append([view.key for view in views])
        return propose(views, budgets)

    drafter.propose = noted  # type: ignore[method-assign]
    ticks = iter(range(10**6))
    auto = AutoDrafter([Candidate(drafter)], mild_cost(ROW), clock=lambda: 0.05 * next(ticks))
    loop = Loop(auto, len)
    loop.begin(0, [0])
    loop.begin(1, [0] * 100)
    for _ in range(24):
        before = [len(loop.views[key].tokens) for key in (0, 1)]
        loop.round([0, 1], 1)
        grown = [len(loop.views[key].tokens) - was for key, was in zip((0, 1), before, strict=True)]
        auto.settle(RoundFacts([0, 1], 3, [2, 1], before, grown, 0.0, 1.0))
    assert asked[:16] == [[0, 1]] * 16 and [0] in asked[16:] and [1] not in asked


def test_while_the_guard_is_shut_nobody_is_asked_and_later_hears_all() -> None:
    """A matcher knows what was committed in the meantime when it is asked again, and when its sequence ends."""
    drafter = Scripted("x", [1.0] * 200, 0.9)
    heard: list[int] = []
    drafter.observe = lambda views, verdicts: heard.extend(len(v.tokens) for v in views)  # type: ignore[method-assign]
    auto = auto_over(Candidate(drafter))
    loop = Loop(auto, len)
    view = loop.begin(0, [0])
    auto.controller.guard.is_open = lambda sequences: len(view.tokens) % 10 == 5  # type: ignore[method-assign]
    for _ in range(12):
        at, asked = len(view.tokens), drafter.asked
        (proposal,) = loop.round([0], 4)
        assert (drafter.asked > asked) == (len(proposal) > 0) == (at % 10 == 5)
        assert heard[-1:] == [at] or at % 10 != 5
    assert drafter.asked > 0
    last = len(view.tokens)
    loop.end(0)
    auto.check_idle()
    assert heard[-1] == last


def test_a_drafter_for_those_who_name_it_is_left_alone_otherwise() -> None:
    auto = auto_over(Candidate(Scripted("a", [1.0] * 200), named=True), Candidate(Scripted("b", [1.0] * 200)))
    loop = Loop(auto, len)
    for key, only in ((1, None), (2, "a")):
        loop.views[key] = SequenceView(key, [0], 1, SamplingParams())
        auto.begin(loop.views[key], only=only)
    for key, name in ((1, "b"), (2, "a")):
        assert {p.drafter for _ in range(20) for p in loop.round([key], 8) if len(p)} == {name}


def test_one_drafter_alone_where_a_request_names_it() -> None:
    auto = auto_over(Candidate(Scripted("a", [1.0] * 200)), Candidate(Scripted("b", [1.0] * 200)))
    loop = Loop(auto, len)
    loop.views[1] = SequenceView(1, [0], 1, SamplingParams())
    auto.begin(loop.views[1], only="b")
    names = {p.drafter for _ in range(20) for p in loop.round([1], 8) if len(p)}
    assert names == {"b"}
    loop.end(1)
    auto.check_idle()


def test_a_useless_matcher_is_asked_less_where_asking_takes_its_time() -> None:
    """Asking takes 5 % of a round and nothing it says comes true: it is asked every eighth round in the end."""
    ticks = iter(range(10**6))
    drafter = Scripted("x", [0.0] * 3000)
    auto = AutoDrafter([Candidate(drafter)], mild_cost(ROW), clock=lambda: 0.05 * next(ticks))
    run(auto, 1000)
    assert 1000 / 8 <= drafter.asked < 1000 / 5


def test_refuses_drafters_it_cannot_tell_apart() -> None:
    with pytest.raises(InvalidParameter, match="different names"):
        auto_over(Candidate(Scripted("x", [])), Candidate(Scripted("x", [])))
    with pytest.raises(InvalidParameter, match="candidates"):
        auto_over()
