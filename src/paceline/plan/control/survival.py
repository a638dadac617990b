"""How often drafts of one drafter come true: learnt over all sequences, corrected for each.

The table of a drafter holds acceptance by position and by the drafter's own confidence (for string matchers that
is a function of the match's length), apart for each range of temperatures; it corrects drafters that claim too
much or too little. What was seen at other temperatures is only where a range starts from. A sequence adds one
correction of the odds for its first draft and one for the later ones: whether text repeats, what the task is and
how long the context has grown are properties of the request, and a few rounds tell. Old outcomes fade in both.

`survival` and `record` are called for every sequence in every round, behind a pass that leaves no cache warm: they
run over a chain in one loop of plain arithmetic. Twin: `tests/control/control_twins.py::SlowLearner`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import NamedTuple

__all__ = ["AcceptanceTable", "Learner", "Range", "temperature_range"]

_PRIOR_ACCEPTANCE = 0.6  # of a draft whose drafter states no confidence, before anything was seen
_PRIOR_WEIGHT = 8.0  # outcomes a prior counts as, in a cell of the table
_TABLE_MEMORY = 256.0  # outcomes a cell remembers before old ones fade
_SEQUENCE_FADE = 0.97  # per outcome: a sequence remembers about the last 30
_SEQUENCE_PRIOR = 5.0  # outcomes that "this sequence is like the others" counts as
_DOUBT_FADE = 0.995  # by round: half of what was learnt is in doubt after some 140 rounds
_LEAST, _MOST = 0.01, 0.99  # no draft is surer than this before it was seen
_LAST_POSITION = 7  # positions from here on share their cells
_CONFIDENCES = 13  # cells by confidence; the last is for "unknown"
_LAST_ROW, _CELLS = _LAST_POSITION * _CONFIDENCES, (_LAST_POSITION + 1) * _CONFIDENCES
_KNOWN, _LATER = 4, 8  # in a learner's own numbers: steps to known confidences, and to drafts behind the first
_KEPT_PRIOR = (1.0 - _SEQUENCE_FADE) * _SEQUENCE_PRIOR  # what does not fade


def temperature_range(temperature: float) -> int:
    """0 greedy, 1 up to 0.5, 2 up to 0.9, 3 above."""
    return 0 if temperature <= 0.0 else 1 if temperature <= 0.5 else 2 if temperature <= 0.9 else 3


class Range(NamedTuple):
    """What is known by cell in one range of temperatures: outcomes and how many were accepted, old ones fading, and the
    estimate as base + slope * the chance that a draft starts from."""

    accepted: list[float]
    outcomes: list[float]
    base: list[float]
    slope: list[float]


class AcceptanceTable:
    """P(accepted | all before it accepted) of one drafter by position, confidence and range of temperatures.

    prior           acceptance of drafts without a stated confidence before anything was seen, in (0, 1)
    first_unknown   cell of a first draft of unknown confidence
    """

    first_unknown = _CONFIDENCES - 1

    def __init__(self, prior: float = _PRIOR_ACCEPTANCE) -> None:
        self.prior = prior
        self._accepted, self._outcomes = [0.0] * _CELLS, [0.0] * _CELLS  # at all temperatures
        self._ranges: dict[int, Range] = {}

    def estimate(self, position: int, confidence: float | None, temperatures: int = 0) -> float:
        """In (0, 1). Starts at the drafter's own confidence, goes by way of all temperatures to its own."""
        known = self.of_range(temperatures)
        (cell,), (start,) = self.cells(position, (confidence,))
        return known.base[cell] + known.slope[cell] * start

    def cells(self, first: int, confidence: Seq[float | None]) -> tuple[list[int], list[float]]:
        """Of drafts of these confidences, from position `first` on: the cell of each, and the chance it starts from.

        Confidences share a cell by tenth, and finer near 1, where odds differ most.
        """
        cells: list[int] = []
        starts: list[float] = []
        row, prior = first * _CONFIDENCES, self.prior
        for stated in confidence:
            if row > _LAST_ROW:
                row = _LAST_ROW
            if stated is None:
                cells.append(row + _CONFIDENCES - 1)
                starts.append(prior)
            elif stated < 0.9:
                cells.append(row + int(stated * 10.0))
                starts.append(stated if stated > _LEAST else _LEAST)
            else:
                cells.append(row + 9 + (stated >= 0.95) + (stated >= 0.98))
                starts.append(stated if stated < _MOST else _MOST)
            row += _CONFIDENCES
        return cells, starts

    def of_range(self, temperatures: int) -> Range:
        """Kept up to date by `record`."""
        known = self._ranges.get(temperatures)
        if known is None:
            known = self._ranges[temperatures] = Range(*([0.0] * _CELLS for _ in Range._fields))
            self._draw(known, range(_CELLS))
        return known

    def _draw(self, known: Range, cells: Iterable[int]) -> None:
        """The estimates of these cells, from a prior by way of all temperatures to their own."""
        for cell in cells:
            own = known.outcomes[cell] + _PRIOR_WEIGHT
            share = _PRIOR_WEIGHT / ((self._outcomes[cell] + _PRIOR_WEIGHT) * own)
            known.base[cell] = known.accepted[cell] / own + share * self._accepted[cell]
            known.slope[cell] = share * _PRIOR_WEIGHT

    def outcomes(self, position: int) -> float:
        """How many outcomes at this position are remembered, at all temperatures."""
        (cell,), _ = self.cells(position, (None,))
        return self._outcomes[cell]

    def acceptance(self) -> float:
        """Of first drafts, as observed at all temperatures; 1.0 before anything was."""
        outcomes = self._outcomes[self.first_unknown]
        return self._accepted[self.first_unknown] / outcomes if outcomes else 1.0

    def record(self, position: int, confidence: float | None, accepted: bool, temperatures: int = 0) -> None:
        """Learn one outcome."""
        self.record_run(*self.cells(position, (confidence,)), int(accepted), self.of_range(temperatures))

    def record_run(self, cells: Seq[int], starts: Seq[float], hits: int, known: Range) -> list[float]:
        """Learn outcomes by their `cells`, of which the first `hits` were accepted; what was expected before each."""
        accepted, outcomes, base, slope = known
        accepted_all, outcomes_all = self._accepted, self._outcomes
        expected: list[float] = []
        for cell, start in zip(cells, starts, strict=True):
            hit = len(expected) < hits
            expected.append(base[cell] + slope[cell] * start)
            own_hits, own = accepted[cell] + hit, outcomes[cell] + 1.0
            if own > _TABLE_MEMORY:
                own_hits, own = own_hits * (_TABLE_MEMORY / own), _TABLE_MEMORY
            all_hits, every = accepted_all[cell] + hit, outcomes_all[cell] + 1.0
            if every > _TABLE_MEMORY:
                all_hits, every = all_hits * (_TABLE_MEMORY / every), _TABLE_MEMORY
            accepted[cell], outcomes[cell] = own_hits, own
            accepted_all[cell], outcomes_all[cell] = all_hits, every
            own += _PRIOR_WEIGHT
            share = _PRIOR_WEIGHT / ((every + _PRIOR_WEIGHT) * own)
            base[cell], slope[cell] = own_hits / own + share * all_hits, share * _PRIOR_WEIGHT
        if len(self._ranges) > 1:
            for other in self._ranges.values():
                if other is not known:
                    self._draw(other, cells)
        return expected


class Learner:
    """Acceptance of one drafter's drafts in one sequence; `table` is shared by all sequences.

    asked_blind   it is chosen before its drafts and their confidences are known

    Of the drafts of a chain either all confidences are known or none is. A sequence multiplies the odds of the table
    by observed over expected odds. It has four such corrections, for first drafts and for later ones, each for
    drafts without and with a known confidence: what the confidences tell already is no news beside them, but is
    beside the mean over all drafts. `_own` holds them in this order, four numbers each: outcomes accepted and not, and
    expected to be and not to be; old ones fade, and those of not stand upon `_SEQUENCE_PRIOR`.
    """

    __slots__ = ("_known", "_own", "asked_blind", "table")

    def __init__(self, table: AcceptanceTable, temperatures: int = 0, asked_blind: bool = True) -> None:
        self.table, self.asked_blind, self._known = table, asked_blind, table.of_range(temperatures)
        self._own = [0.0, _SEQUENCE_PRIOR] * 8

    def survival(self, confidence: Seq[float | None], floor: float = 0.0) -> list[float]:
        """P(drafts 0..i are all accepted), by position, for drafts of these confidences (None: unknown).

        Ends before the first that falls under `floor`.
        """
        return _products(self._chances(0, confidence), floor)

    def survival_unstated(self, length: int, floor: float = 0.0) -> list[float]:
        """`survival` of `length` drafts of unknown confidence: from some position on all have the same chance."""
        chances = self._chances(0, (None,) * min(length, _LAST_POSITION + 1))
        return _products(chances + chances[-1:] * (length - len(chances)), floor)

    def acceptance(self, position: int, confidence: float | None) -> float:
        """P(draft `position` is accepted | all before it are)."""
        return self._chances(position, (confidence,))[0]

    def hopeful(self, length: int, unseen: int) -> list[float]:
        """Survival as it may be at best: a deviation above what is expected, more where little was seen; and
        what was learnt `unseen` rounds ago may no longer hold."""
        doubt, prior = 1.0 - _DOUBT_FADE**unseen, self.table.prior
        result, product, at = [], 1.0, 0
        for mean in self._chances(0, (None,) * length):
            if prior > mean:
                mean += doubt * (prior - mean)
            known = self._own[at] + self._own[at + 1] - _SEQUENCE_PRIOR
            product *= min(mean + (mean * (1.0 - mean) / (1.0 + known)) ** 0.5, 0.98)
            result.append(product)
            at = _LATER
        return result

    def fade(self, share: float) -> None:
        """Nothing was seen for a round: what is known of this sequence goes back towards what is of all."""
        rest, own = (1.0 - share) * _SEQUENCE_PRIOR, self._own
        own[0::2] = [share * number for number in own[0::2]]
        own[1::2] = [share * number + rest for number in own[1::2]]

    def record(self, first: int, confidence: Seq[float | None], hits: int) -> None:
        """Drafts of these confidences, from position `first` on: the first `hits` were accepted, and the next, where
        there is one, was not; all before them were accepted.

        Those of known confidence count for the mean over all drafts as well; where it is not asked blind the table's
        mean over first drafts is enough.
        """
        if not confidence:
            return
        known = confidence[0] is not None
        cells, starts = self.table.cells(first, confidence)
        if known and not first and not self.asked_blind:  # in front, and as much a hit as the first draft
            cells, starts = [self.table.first_unknown, *cells], [self.table.prior, *starts]
            expected = self.table.record_run(cells, starts, hits + (hits > 0), self._known)[1:]
        else:
            expected = self.table.record_run(cells, starts, hits, self._known)
        self._correct((_KNOWN if known else 0) + (_LATER if first else 0), expected, hits)
        if known and self.asked_blind:
            self.record(first, (None,) * len(confidence), hits)

    def _chances(self, first: int, confidence: Seq[float | None]) -> list[float]:
        """`acceptance` of drafts from position `first` on. Cells and starts are those of `AcceptanceTable.cells`."""
        chances: list[float] = []
        if not confidence:
            return chances
        own, prior = self._own, self.table.prior
        _, _, base, slope = self._known
        at = 0 if confidence[0] is None else _KNOWN
        row = first * _CONFIDENCES
        if first:
            at += _LATER
        accepted, not_accepted, expected, not_expected = own[at : at + 4]
        for stated in confidence:
            if row > _LAST_ROW:
                row = _LAST_ROW
            if stated is None:
                cell, start = row + _CONFIDENCES - 1, prior
            elif stated < 0.9:
                cell, start = row + int(stated * 10.0), stated if stated > _LEAST else _LEAST
            else:
                cell, start = row + 9 + (stated >= 0.95) + (stated >= 0.98), stated if stated < _MOST else _MOST
            chance = base[cell] + slope[cell] * start
            alike = _SEQUENCE_PRIOR * chance
            hits = (accepted + alike) * (not_expected - alike) * chance
            chances.append(hits / (hits + (not_accepted - alike) * (expected + alike) * (1.0 - chance)))
            if row == 0:
                at += _LATER
                accepted, not_accepted, expected, not_expected = own[at : at + 4]
            row += _CONFIDENCES
        return chances

    def _correct(self, at: int, chances: Seq[float], hits: int) -> None:
        """Outcomes beside what the table expected, the first of them for the correction `at`."""
        own = self._own
        accepted, not_accepted, expected, not_expected = own[at : at + 4]
        for chance in chances:
            accepted *= _SEQUENCE_FADE
            not_accepted = not_accepted * _SEQUENCE_FADE + _KEPT_PRIOR
            if hits > 0:
                accepted += 1.0
                hits -= 1
            else:
                not_accepted += 1.0
            expected = expected * _SEQUENCE_FADE + chance
            not_expected = not_expected * _SEQUENCE_FADE + (_KEPT_PRIOR + 1.0 - chance)
            if at < _LATER:
                own[at : at + 4] = accepted, not_accepted, expected, not_expected
                at += _LATER
                accepted, not_accepted, expected, not_expected = own[at : at + 4]
        own[at : at + 4] = accepted, not_accepted, expected, not_expected


def _products(chances: Iterable[float], floor: float) -> list[float]:
    """Running products, up to the first under `floor`; no chance is above 1."""
    products = list(accumulate(chances, mul))
    while products and products[-1] < floor:
        products.pop()
    return products
