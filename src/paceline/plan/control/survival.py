"""How often drafts of one drafter come true: learnt over all sequences, corrected for each.

The table of a drafter holds acceptance by position and by the drafter's own confidence (for string matchers that
is a function of the match's length), apart for each range of temperatures; it corrects drafters that claim too
much or too little. What was seen at other temperatures is only where a range starts from. A sequence adds one
correction of the odds for its first draft and one for the later ones: whether text repeats, what the task is and
how long the context has grown are properties of the request, and a few rounds tell. Old outcomes fade in both.

`survival` and `record` are called for every draft in every round: plain arithmetic, about a microsecond each.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

__all__ = ["AcceptanceTable", "Corrections", "Learner", "temperature_range"]

_PRIOR_ACCEPTANCE = 0.6  # of a draft whose drafter states no confidence, before anything was seen
_PRIOR_WEIGHT = 8.0  # outcomes a prior counts as, in a cell of the table
_TABLE_MEMORY = 256.0  # outcomes a cell remembers before old ones fade
_SEQUENCE_FADE = 0.97  # per outcome: a sequence remembers about the last 30
_SEQUENCE_PRIOR = 5.0  # outcomes that "this sequence is like the others" counts as
_DOUBT_FADE = 0.995  # by round: half of what was learnt is in doubt after some 140 rounds
_LEAST, _MOST = 0.01, 0.99  # no draft is surer than this before it was seen
_LAST_POSITION = 7  # positions from here on share their cells
_CONFIDENCES = 13  # cells by confidence; the last is for "unknown"
_ALL = 4  # the range that holds every temperature


def temperature_range(temperature: float) -> int:
    """0 greedy, 1 up to 0.5, 2 up to 0.9, 3 above."""
    return 0 if temperature <= 0.0 else 1 if temperature <= 0.5 else 2 if temperature <= 0.9 else 3


class AcceptanceTable:
    """P(accepted | all before it accepted) of one drafter by position, confidence and range of temperatures.

    prior   acceptance of drafts without a stated confidence before anything was seen, in (0, 1)
    """

    def __init__(self, prior: float = _PRIOR_ACCEPTANCE) -> None:
        self.prior = prior
        size = (_LAST_POSITION + 1) * _CONFIDENCES
        self._outcomes = [[0.0] * size for _ in range(_ALL + 1)]
        self._accepted = [[0.0] * size for _ in range(_ALL + 1)]
        self._lines: dict[int, tuple[list[float], list[float]]] = {}

    def estimate(self, position: int, confidence: float | None, temperatures: int = 0) -> float:
        """In (0, 1). Starts at the drafter's own confidence, goes by way of all temperatures to its own."""
        base, slope = self.lines(temperatures)
        cell = _cell(position, confidence)
        return base[cell] + slope[cell] * self._start(confidence)

    def lines(self, temperatures: int) -> tuple[list[float], list[float]]:
        """By cell: `estimate` is base + slope * the chance it starts from. Kept up to date by `record`."""
        known = self._lines.get(temperatures)
        if known is None:
            cells = range(len(self._outcomes[_ALL]))
            pairs = [self._line(cell, temperatures) for cell in cells]
            self._lines[temperatures] = known = [base for base, _ in pairs], [slope for _, slope in pairs]
        return known

    def _line(self, cell: int, temperatures: int) -> tuple[float, float]:
        return _line(
            self._accepted[temperatures][cell],
            self._outcomes[temperatures][cell],
            self._accepted[_ALL][cell],
            self._outcomes[_ALL][cell],
        )

    def _start(self, confidence: float | None) -> float:
        return self.prior if confidence is None else min(max(confidence, _LEAST), _MOST)

    def outcomes(self, position: int, temperatures: int = _ALL) -> float:
        """How many outcomes at this position are remembered."""
        return self._outcomes[temperatures][_cell(position, None)]

    def acceptance(self) -> float:
        """Of first drafts, as observed at all temperatures; 1.0 before anything was."""
        cell = _cell(0, None)
        outcomes = self._outcomes[_ALL][cell]
        return self._accepted[_ALL][cell] / outcomes if outcomes else 1.0

    def record(self, position: int, confidence: float | None, accepted: bool, temperatures: int = 0) -> float:
        """Learn one outcome; what was expected before it."""
        cell = _cell(position, confidence)
        base, slope = self.lines(temperatures)
        expected = base[cell] + slope[cell] * self._start(confidence)
        accepted_all, outcomes_all = _count(self._accepted[_ALL], self._outcomes[_ALL], cell, accepted)
        accepted_own, outcomes_own = _count(self._accepted[temperatures], self._outcomes[temperatures], cell, accepted)
        base[cell], slope[cell] = _line(accepted_own, outcomes_own, accepted_all, outcomes_all)
        if len(self._lines) > 1:
            for other, (its_base, its_slope) in self._lines.items():
                its_base[cell], its_slope[cell] = self._line(cell, other)
        return expected


def _line(accepted: float, outcomes: float, accepted_all: float, outcomes_all: float) -> tuple[float, float]:
    """Base and slope of an estimate that goes from a prior by way of all temperatures to its own."""
    own = outcomes + _PRIOR_WEIGHT
    share = _PRIOR_WEIGHT / ((outcomes_all + _PRIOR_WEIGHT) * own)
    return accepted / own + share * accepted_all, share * _PRIOR_WEIGHT


def _count(accepted: list[float], outcomes: list[float], cell: int, hit: bool) -> tuple[float, float]:
    """One more outcome in a cell, old ones fading; what it holds now."""
    hits, seen = accepted[cell] + hit, outcomes[cell] + 1.0
    if seen > _TABLE_MEMORY:
        hits, seen = hits * (_TABLE_MEMORY / seen), _TABLE_MEMORY
    accepted[cell], outcomes[cell] = hits, seen
    return hits, seen


@dataclass(slots=True)
class _Correction:
    """Outcomes of one sequence beside what the table expected of them, fading."""

    accepted: float = 0.0
    expected: float = 0.0
    outcomes: float = 0.0

    def apply(self, chance: float) -> float:
        """The chance after multiplying its odds by observed over expected odds."""
        if self.outcomes == 0.0:
            return chance
        more, less = _SEQUENCE_PRIOR * chance, _SEQUENCE_PRIOR * (1.0 - chance)
        hits = (self.accepted + more) * (self.outcomes - self.expected + less) * chance
        misses = (self.outcomes - self.accepted + less) * (self.expected + more) * (1.0 - chance)
        return hits / (hits + misses)

    def record(self, expected: float, accepted: bool) -> None:
        self.accepted = self.accepted * _SEQUENCE_FADE + accepted
        self.expected = self.expected * _SEQUENCE_FADE + expected
        self.outcomes = self.outcomes * _SEQUENCE_FADE + 1.0

    def fade(self, share: float) -> None:
        self.accepted *= share
        self.expected *= share
        self.outcomes *= share


class Corrections:
    """One for first drafts and one for later ones, each for drafts of a stated confidence and for those of none: what
    the confidences tell already is no news beside them, but is beside the mean over all drafts."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all = [_Correction() for _ in range(4)]

    def of(self, position: int, stated: bool) -> _Correction:
        return self._all[2 * (position > 0) + stated]

    def fade(self, share: float) -> None:
        for correction in self._all:
            correction.fade(share)


@dataclass(slots=True)
class Learner:
    """Acceptance of one drafter's drafts in one sequence; `table` is shared by all sequences.

    asked_blind   it is chosen before its drafts and their confidences are known
    """

    table: AcceptanceTable
    temperatures: int = 0
    asked_blind: bool = True
    _own: Corrections = field(default_factory=Corrections)

    def survival(self, confidence: Seq[float | None], floor: float = 0.0) -> list[float]:
        """P(drafts 0..i are all accepted), by position, for drafts of these confidences (None: unknown).

        Ends before the first that falls under `floor`. The product of `acceptance`, in one loop.
        """
        result: list[float] = []
        base, slope = self.table.lines(self.temperatures)
        prior, product = self.table.prior, 1.0
        for position, stated in enumerate(confidence):
            cell = _cell(position, stated)
            start = prior if stated is None else _LEAST if stated < _LEAST else _MOST if stated > _MOST else stated
            chance = self._own.of(position, stated is not None).apply(base[cell] + slope[cell] * start)
            product *= chance
            if product < floor:
                break
            result.append(product)
        return result

    def survival_unstated(self, length: int, floor: float = 0.0) -> list[float]:
        """`survival` of `length` drafts of unknown confidence: from some position on all have the same chance."""
        result = self.survival((None,) * min(length, _LAST_POSITION + 1), floor)
        if len(result) <= _LAST_POSITION:
            return result
        chance = self.acceptance(_LAST_POSITION, None)
        while len(result) < length and (product := result[-1] * chance) >= floor:
            result.append(product)
        return result

    def acceptance(self, position: int, confidence: float | None) -> float:
        """P(draft `position` is accepted | all before it are)."""
        chance = self.table.estimate(position, confidence, self.temperatures)
        return self._own.of(position, confidence is not None).apply(chance)

    def hopeful(self, length: int, unseen: int) -> list[float]:
        """Survival as it may be at best: a deviation above what is expected, more where little was seen; and
        what was learnt `unseen` rounds ago may no longer hold."""
        doubt = 1.0 - _DOUBT_FADE**unseen
        result, product = [], 1.0
        for position in range(length):
            mean = self.acceptance(position, None)
            mean += doubt * max(self.table.prior - mean, 0.0)
            known = self._own.of(position, False).outcomes
            product *= min(mean + (mean * (1.0 - mean) / (1.0 + known)) ** 0.5, 0.98)
            result.append(product)
        return result

    def fade(self, share: float) -> None:
        """Nothing was seen for a round: what is known of this sequence goes back towards what is of all."""
        self._own.fade(share)

    def record(self, first: int, confidence: Seq[float | None], hits: int) -> None:
        """Drafts of these confidences, from position `first` on: the first `hits` were accepted, and the next, where
        there is one, was not; all before them were accepted."""
        for position, stated in enumerate(confidence, start=first):
            accepted = position - first < hits
            self._record(position, stated, accepted)
            if stated is not None and (self.asked_blind or position == 0):  # of first drafts the table keeps the mean
                self._record(position, None, accepted)

    def _record(self, position: int, confidence: float | None, accepted: bool) -> None:
        expected = self.table.record(position, confidence, accepted, self.temperatures)
        self._own.of(position, confidence is not None).record(expected, accepted)


def _cell(position: int, confidence: float | None) -> int:
    """Confidences share a cell by tenth, and finer near 1, where odds differ most."""
    row = (position if position < _LAST_POSITION else _LAST_POSITION) * _CONFIDENCES
    if confidence is None:
        return row + _CONFIDENCES - 1
    if confidence < 0.9:
        return row + int(confidence * 10)
    return row + 9 + (confidence >= 0.95) + (confidence >= 0.98)
