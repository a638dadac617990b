"""`auto`: which drafter, how far, and that it neither goes blind nor pays much for looking."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from drafter_toys import Loop

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.auto import AutoDrafter, AutoOptions, Candidate
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.learn import AcceptanceTable, Learner
from paceline.errors import InvalidParameter


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


def dear(rows: int) -> float:
    return 1.0 + 0.1 * (rows - 1)


def run(auto: AutoDrafter, until: int, budget: int = 8) -> tuple[list[Proposal], list[int]]:
    """Rounds of a target whose token at position i is i, until `until` tokens; proposals, positions."""
    loop = Loop(auto, len)
    view = loop.begin(0, [0])
    proposals, at = [], []
    while len(view.tokens) < until:
        at.append(len(view.tokens))
        proposals += loop.round([0], budget)
    loop.end(0)
    auto.check_idle()
    return proposals, at


def rate(proposals: list[Proposal], at: list[int], until: int, token_cost: float) -> float:
    """Tokens per cost, 1 is plain decoding."""
    cost = sum(dear(1 + len(p)) + token_cost * len(p) for p in proposals)
    return (until - at[0]) / cost


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("shadow", [True, False])
def test_pl_13_comes_back_after_a_bad_stretch(shadow: bool, fault: bool) -> None:
    """Acceptance 0.15, then 0.9, then 0.15: the length falls, comes back within 200 rounds, falls again.

    The fault: no trials. A costly drafter is then never seen again; a free one is watched without trials.
    """
    chances = [0.15] * 600 + [0.9] * 2400 + [0.15] * 2000
    token_cost = 0.0 if shadow else 0.15
    options = AutoOptions(probe_share=0.0) if fault else AutoOptions()
    auto = AutoDrafter([Candidate(Scripted("x", chances), token_cost, shadow=shadow)], dear, options)
    proposals, at = run(auto, 4000)

    def mean_length(low: int, high: int) -> float:
        lengths = [len(p) for p, position in zip(proposals, at, strict=True) if low <= position < high]
        return sum(lengths) / len(lengths)

    assert mean_length(100, 600) < 1.0
    came_back = mean_length(1000, 3000) > 3.0
    assert came_back == (shadow or not fault)
    if came_back:
        rounds = [i for i, position in enumerate(at) if position >= 600]
        back = next(i for i in rounds if all(len(p) >= 2 for p in proposals[i : i + 3]))
        assert back - rounds[0] < 200
    assert mean_length(3100, 3900) < 1.0


@pytest.mark.parametrize("shadow", [True, False])
def test_a_drafter_that_is_always_wrong_costs_little(shadow: bool) -> None:
    token_cost = 0.0 if shadow else 0.3
    auto = AutoDrafter([Candidate(Scripted("x", [0.0] * 3000), token_cost, shadow=shadow)], dear)
    proposals, at = run(auto, 2000)
    assert rate(proposals[50:], at[50:], 2000, token_cost) > 0.97
    assert rate(proposals, at, 2000, token_cost) > 0.96
    assert any(map(len, proposals[1000:])) != shadow, (
        "the costly one is tried again, the free one need not be"
    )


def test_a_drafter_that_is_always_right_is_used_to_the_full() -> None:
    auto = AutoDrafter([Candidate(Scripted("x", [1.0] * 3000), 0.1)], dear)
    proposals, _ = run(auto, 2000)
    assert all(len(p) == 8 for p in proposals[60:-1])


def test_takes_the_better_of_two_and_names_it() -> None:
    good, bad = Scripted("good", [0.8] * 3000), Scripted("bad", [0.3] * 3000)
    auto = AutoDrafter([Candidate(bad, shadow=True), Candidate(good, shadow=True)], dear)
    proposals, _ = run(auto, 2000)
    names = [p.drafter for p in proposals[50:] if len(p)]
    assert names.count("good") > 0.9 * len(names)


def test_free_but_poor_or_dear_but_good_is_a_matter_of_price() -> None:
    for token_cost, winner in ((0.02, "model"), (1.5, "free")):
        free = Candidate(Scripted("free", [0.5] * 3000, 0.5), shadow=True)
        auto = AutoDrafter([free, Candidate(Scripted("model", [0.9] * 3000), token_cost)], dear)
        proposals, _ = run(auto, 2000)
        names = [p.drafter for p in proposals[100:] if len(p)]
        assert names.count(winner) > 0.8 * len(names), (token_cost, winner)


def test_a_free_drafter_is_learnt_while_it_is_not_used() -> None:
    """Shadow drafts are scored over several plain rounds, so later positions are known as well."""
    auto = AutoDrafter(
        [Candidate(Scripted("x", [0.9] * 3000, 0.5), shadow=True)], lambda rows: float(rows) ** 3
    )
    proposals, _ = run(auto, 1500)
    assert not any(map(len, proposals)), "at this cost nothing pays"
    (table,) = auto.tables
    for position in range(6):
        assert abs(table.estimate(position, 0.5) - 0.9) < 0.1, position
    assert AcceptanceTable().estimate(0, 0.5) == pytest.approx(0.5)


def test_an_overconfident_drafter_is_corrected() -> None:
    learner = Learner(AcceptanceTable())
    for i in range(200):
        learner.record(0, 0.95, i % 10 < 3)
    assert learner.survival([0.95])[0] == pytest.approx(0.3, abs=0.1)


def test_a_sequence_departs_from_the_others_within_a_few_rounds() -> None:
    table = AcceptanceTable()
    for i in range(400):
        table.record(0, 0.8, i % 10 < 8)
    learner = Learner(table)
    for _ in range(10):
        learner.record(0, 0.8, False)
    assert learner.survival([0.8])[0] < 0.35
    assert Learner(table).survival([0.8])[0] > 0.7


def test_refuses_drafters_it_cannot_tell_apart() -> None:
    with pytest.raises(InvalidParameter, match="different names"):
        AutoDrafter([Candidate(Scripted("x", [])), Candidate(Scripted("x", []))])
    with pytest.raises(InvalidParameter, match="candidates"):
        AutoDrafter([])
    with pytest.raises(InvalidParameter, match="probe_share"):
        AutoOptions(probe_share=1.0)
