"""A controller run over recorded texts, without a model: what it would have done, and what that would have cost.

A text says, for every drafter and position, how many drafts it would have offered and how many of them the text
goes on with (`Drafts` of a probe). Under `coupled` and greedy the text is the same whoever drafts how far, so any
policy can be run over it: the live controller, a fixed length, or plain decoding. Prices are given; what the
controller believes of them it learns, as it does live.

Beyond the first draft that misses a text knows no confidence; the last one known stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.lengths import Load
from paceline.plan.control.records import Ask, Choice, Lesson, RoundFacts
from paceline.plan.probe_file import Drafts

__all__ = ["Fixed", "OfflineText", "Prices", "RoundLog", "Totals", "run_offline"]


@dataclass(frozen=True, slots=True)
class OfflineText:
    """drafts      by index of the drafter; one entry for each position
    prompt      tokens before it
    positions   tokens that rounds emit
    arrives     it is there once all texts together have emitted so many tokens
    """

    drafts: Mapping[int, Drafts]
    prompt: int
    positions: int
    temperature: float = 0.0
    arrives: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """What things really cost: `passes` is read, never taught.

    steps    by costly drafter
    ask_s    of asking one free drafter for one sequence
    slow     how slow the machine is in each round, 1.0 as priced
    """

    passes: LiveCost
    steps: Mapping[int, StepTimes] = field(default_factory=dict)
    ask_s: float = 0.0
    slow: Callable[[int], float] = lambda _: 1.0


@dataclass(frozen=True, slots=True)
class RoundLog:
    """batch, drafted (nodes, all sequences), emitted, seconds, and what a plain round would have taken."""

    batch: int
    drafted: int
    emitted: int
    seconds: float
    plain_s: float


@dataclass(slots=True)
class Totals:
    """Rounds in order."""

    rounds: list[RoundLog] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    @property
    def tokens(self) -> int:
        return sum(r.emitted for r in self.rounds)


class Fixed:
    """A policy of one drafter and one length; `drafter` None decodes plainly."""

    def __init__(self, drafter: int | None, length: int, free: bool = True) -> None:
        self.drafter, self.length, self.free = drafter, length, free

    def choose(self, asks: Seq[Ask]) -> list[Choice]:
        choices = []
        for ask in asks:
            most = min(self.length, ask.budget)
            if self.free:
                offer = None if self.drafter is None else ask.offers.get(self.drafter)
                most = min(most, 0 if offer is None else len(offer))
            choices.append(Choice(self.drafter, most) if most > 0 else Choice())
        return choices


@dataclass(slots=True)
class _Running:
    key: int
    text: OfflineText
    at: int = 0
    known: dict[int, int] = field(default_factory=dict)  # by costly drafter: tokens it has read
    watched: dict[int, int] = field(default_factory=dict)  # by drafter: position up to which drafts are being held

    @property
    def context(self) -> int:
        return self.text.prompt + 1 + self.at


def run_offline(
    texts: Seq[OfflineText],
    policy: Controller | Fixed,
    prices: Prices,
    batch: int = 1,
    max_draft: int = 15,
) -> Totals:
    """Every text to its end, at most `batch` together."""
    waiting = sorted(range(len(texts)), key=lambda i: texts[i].arrives)
    running: list[_Running] = []
    totals, emitted = Totals(), 0
    while waiting or running:
        while waiting and len(running) < batch and (not running or texts[waiting[0]].arrives <= emitted):
            key = waiting.pop(0)
            running.append(_Running(key, texts[key]))
            if isinstance(policy, Controller):
                policy.begin(key, texts[key].temperature)
        totals.rounds.append(_round(running, policy, prices, prices.slow(len(totals.rounds)), max_draft))
        emitted += totals.rounds[-1].emitted
        for done in [r for r in running if r.at >= r.text.positions]:
            running.remove(done)
            if isinstance(policy, Controller):
                policy.end(done.key)
    return totals


def _round(
    running: list[_Running], policy: Controller | Fixed, prices: Prices, slow: float, max_draft: int
) -> RoundLog:
    asks = [_ask(r, prices, max_draft) for r in running]
    shut = isinstance(policy, Controller) and not policy.may_draft()
    choices = [Choice()] * len(asks) if shut else policy.choose(asks)
    drafted, lengths = _drafted(running, asks, choices, policy, prices)
    queries = [1 + n for n in lengths]
    contexts = [r.context for r in running]
    keys = prices.passes.all_keys(queries, contexts)
    plain_keys = prices.passes.all_keys([1] * len(running), contexts)
    asked = 0 if shut or (isinstance(policy, Fixed) and policy.drafter is None) else sum(len(a.offers) for a in asks)
    draft_s = slow * (drafted + asked * prices.ask_s)
    whole_s = slow * prices.passes.seconds(sum(queries), keys, len(running)) + draft_s
    emitted = [_advance(*each, policy) for each in zip(running, choices, lengths, strict=True)]
    if isinstance(policy, Controller):
        policy.committed([r.key for r in running], choices, emitted)
        policy.settle(RoundFacts([r.key for r in running], sum(queries), queries, contexts, emitted, draft_s, whole_s))
    plain_s = slow * prices.passes.seconds(len(running), plain_keys, len(running))
    return RoundLog(len(running), sum(lengths), sum(emitted), whole_s, plain_s)


def _ask(r: _Running, prices: Prices, max_draft: int) -> Ask:
    room = r.text.positions - r.at
    budget = min(max_draft, room - 1)
    offers, missing = {}, {}
    for index, drafts in r.text.drafts.items():
        if budget <= 0:
            break
        if index in prices.steps:
            missing[index] = r.context - r.known.get(index, 0)
        elif drafts.proposed[r.at]:
            offers[index] = _offer(drafts, r.at)
    return Ask(r.key, r.context, budget, room, offers, missing)


def _offer(drafts: Drafts, at: int) -> Seq[float | None]:
    proposed = drafts.proposed[at]
    if drafts.confidence is None:
        return (None,) * proposed
    known = drafts.confidence[at][:proposed]
    return (*known, *known[-1:] * (proposed - len(known)))


def _drafted(
    running: Seq[_Running], asks: Seq[Ask], choices: list[Choice], policy: Controller | Fixed, prices: Prices
) -> tuple[float, list[int]]:
    """Seconds of the costly drafters, and the drafts of each sequence that are verified; `choices` as they came out."""
    seconds, lengths = 0.0, [choice.length for choice in choices]
    for index, steps in prices.steps.items():
        chosen = [i for i, choice in enumerate(choices) if choice.drafter == index]
        if not chosen:
            continue
        made = [_made(running[i], choices[i], policy) for i in chosen]
        for i, n in zip(chosen, made, strict=True):
            choices[i] = choices[i].made(n)
        missing = sum(asks[i].missing[index] for i in chosen)
        took = steps.at(max(missing, len(chosen)))
        took += sum(steps.at(sum(n > depth for n in made)) for depth in range(1, max(made)))
        seconds += took
        kept = list(made)
        if isinstance(policy, Controller):
            policy.drafted(index, made, missing, took)
            refined = [(i, n) for i, n in zip(chosen, made, strict=True) if choices[i].risk_s is None]
            offers = [(asks[i], index, _offer(running[i].text.drafts[index], running[i].at)[:n]) for i, n in refined]
            if offers and running[chosen[0]].text.drafts[index].confidence is not None:
                keep = dict(zip((i for i, _ in refined), policy.refine(offers, Load()), strict=True))
                kept = [keep.get(i, n) for i, n in zip(chosen, made, strict=True)]
        for i, n, whole in zip(chosen, kept, made, strict=True):
            r = running[i]
            lengths[i] = n
            r.known[index] = r.context + min(r.text.drafts[index].matched[r.at], whole - 1)
    return seconds, lengths


def _made(r: _Running, choice: Choice, policy: Controller | Fixed) -> int:
    """Drafts made before the drafter stops by itself."""
    assert choice.drafter is not None
    drafts = r.text.drafts[choice.drafter]
    most = min(choice.length, max(drafts.proposed[r.at], 1))
    if isinstance(policy, Fixed) or drafts.confidence is None:
        return most
    stated = [c for c in _offer(drafts, r.at) if c is not None]
    made = 1
    while made < most and policy.worth_going_on(r.key, choice, stated[:made]):
        made += 1
    return made


def _advance(r: _Running, choice: Choice, length: int, policy: Controller | Fixed) -> int:
    """Commit what a round emits; the controller learns as it does live, once a draft has met the text."""
    accepted = 0 if choice.drafter is None else min(length, r.text.drafts[choice.drafter].matched[r.at])
    emitted = min(accepted + 1, r.text.positions - r.at)
    if isinstance(policy, Controller):
        for index, drafts in r.text.drafts.items():
            costly = not policy.drafters[index].free
            if r.watched.get(index, 0) > r.at or (costly and choice.drafter != index):
                continue
            proposed = min(drafts.proposed[r.at], choice.length) if costly else drafts.proposed[r.at]
            hits = min(drafts.matched[r.at], proposed)
            confidence = _offer(drafts, r.at)
            policy.learn([Lesson(r.key, index, 0, confidence[: min(hits + 1, proposed)], hits)])
            r.watched[index] = r.at + hits + 1
    r.at += emitted
    return emitted
