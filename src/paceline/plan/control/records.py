"""What the controller is told and what it answers: plain data, so that it runs live, in a replay or in a simulation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from paceline.errors import InvalidParameter
from paceline.plan.control.cost import StepTimes

__all__ = [
    "AUTO_MATCHER",
    "MATCHERS",
    "Ask",
    "Choice",
    "ControlOptions",
    "DraftAlarm",
    "DrafterFacts",
    "Lesson",
    "RoundFacts",
    "asked_by_auto",
]


MATCHERS = ("ngram", "suffix")
AUTO_MATCHER = "suffix"  # what `auto` asks of these: `ngram` beside it finds nothing more (docs/log.md)


def asked_by_auto(names: Collection[str], asked_for: Collection[str] = ()) -> set[str]:
    """Of the drafters `names` those that `auto` asks: one string matcher, where no `--draft` names another."""
    if AUTO_MATCHER not in names:
        return set(names)
    return {name for name in names if name not in MATCHERS or name == AUTO_MATCHER or name in asked_for}


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter as the controller sees it.

    steps   seconds of one drafting step by sequences, and of catching up by tokens; None where drafting costs
            next to nothing: such a drafter is asked first and its offer is what is chosen from
    """

    name: str
    steps: StepTimes | None = None

    @property
    def free(self) -> bool:
        return self.steps is None


class Ask(NamedTuple):
    """One sequence before a round.

    context      committed tokens
    budget       draft tokens on the longest path at most
    room         tokens it may still emit
    offers       by free drafter that has drafts: the confidence of each, all None where it states none
    missing      by costly drafter: tokens it has to read before it can draft
    """

    key: int
    context: int
    budget: int
    room: int
    offers: Mapping[int, Seq[float | None]] = MappingProxyType({})
    missing: Mapping[int, int] = MappingProxyType({})


class Lesson(NamedTuple):
    """What came of drafts of one sequence, used or only watched: from position `first` on and of these confidences, the
    first `hits` were what was committed, and the next, where there is one, was not."""

    key: int
    drafter: int
    first: int
    confidence: Seq[float | None]
    hits: int


class Choice(NamedTuple):
    """Who drafts for one sequence, and how far.

    drafter    index; None decodes plainly
    length     draft tokens
    keep       a costly drafter goes on while the chance that its next draft is accepted is at least this
    risk_s     of a trial: seconds lost if what it adds is rejected; None where this is no trial
    usual      drafts that would have been taken anyway
    """

    drafter: int | None = None
    length: int = 0
    keep: float = 0.0
    risk_s: float | None = None
    usual: int = 0

    def made(self, drafts: int) -> Choice:
        """What it came to where the drafter stopped by itself: a trial that was broken off risked less."""
        if self.risk_s is None or drafts >= self.length:
            return self
        risk_s = self.risk_s * max(drafts - self.usual, 1) / (self.length - self.usual)
        return self._replace(length=drafts, risk_s=risk_s)


class RoundFacts(NamedTuple):
    """A round that is over. Sequences are those that decoded, in one order.

    keys       the sequences
    rows       of the pass, prompts not counted
    queries    rows of each sequence
    contexts   committed tokens of each before the round
    emitted    tokens each emitted
    draft_s    seconds spent on drafters (asking, drafting, telling them)
    whole_s    seconds of the whole round
    prefill    prompt rows were in the pass: its time says nothing of decoding
    """

    keys: Seq[int]
    rows: int
    queries: Seq[int]
    contexts: Seq[int]
    emitted: Seq[int]
    draft_s: float
    whole_s: float
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class DraftAlarm:
    """A drafter whose first draft comes true too seldom to pay for itself, over the last `outcomes` of them."""

    drafter: str
    acceptance: float
    needed: float
    outcomes: int

    def __str__(self) -> str:
        return (
            f"the drafter {self.drafter} is of no use here: {self.acceptance:.1%} of its first drafts are accepted "
            f"({self.outcomes} seen), {self.needed:.1%} would pay; leave it away or use another"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """min_gain      entering speculation must promise this share more tokens a second than plain decoding, >= 0
    stay_gain     going on with it this much, in [0, min_gain]
    probe_share   what trials of costly drafters may lose, as a share of all time, in [0, 1)
    probe_length  the shortest trial, tokens, >= 1
    plain_share   what plain rounds taken only to measure them may lose, as a share of all time, in [0, 1)
    plain_every   rounds after which the plain round is measured again, >= 1
    ask_share     what free drafters may take where they bring nothing, as a share of a round, in (0, 1)
    """

    min_gain: float = 0.02
    stay_gain: float = 0.005
    probe_share: float = 0.01
    probe_length: int = 4
    plain_share: float = 0.004
    plain_every: int = 64
    ask_share: float = 0.008

    def __post_init__(self) -> None:
        for name in ("probe_share", "plain_share", "ask_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InvalidParameter(name, getattr(self, name), "a number from 0 to below 1")
        if self.min_gain < 0.0:
            raise InvalidParameter("min_gain", self.min_gain, "a number from 0")
        if not 0.0 <= self.stay_gain <= self.min_gain:
            raise InvalidParameter("stay_gain", self.stay_gain, f"a number from 0 to min_gain ({self.min_gain})")
        for name in ("probe_length", "plain_every"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "a whole number from 1")
