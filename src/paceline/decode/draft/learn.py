"""How often drafts of one drafter come true: learnt over all sequences, corrected for each.

The engine-wide table holds acceptance by position and by the drafter's own confidence; it corrects drafters
that claim too much or too little. A sequence adds one correction of the odds for its first draft and one for
the later ones: whether text repeats is a property of the request, and a few rounds tell. Old outcomes fade in
both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

__all__ = ["AcceptanceTable", "Learner"]

_PRIOR_ACCEPTANCE = 0.6  # of a draft whose drafter states no confidence, before anything was seen
_PRIOR_WEIGHT = 8.0  # outcomes a prior counts as, in a cell of the table
_TABLE_MEMORY = 256.0  # outcomes a cell remembers before old ones fade
_SEQUENCE_FADE = 0.95  # per outcome: a sequence remembers about the last 20
_SEQUENCE_PRIOR = 2.0  # outcomes that "this sequence is like the others" counts as
_LAST_POSITION = 7  # positions from here on share their cells


class AcceptanceTable:
    """P(accepted | all before it accepted) of one drafter by position and confidence, over all sequences."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int | None], tuple[float, float]] = {}  # -> outcomes, accepted

    def estimate(self, position: int, confidence: float | None) -> float:
        """In (0, 1). Starts at the drafter's own confidence."""
        outcomes, accepted = self._cells.get(_cell(position, confidence), (0.0, 0.0))
        prior = _PRIOR_ACCEPTANCE if confidence is None else min(max(confidence, 0.01), 0.99)
        return (accepted + _PRIOR_WEIGHT * prior) / (outcomes + _PRIOR_WEIGHT)

    def record(self, position: int, confidence: float | None, accepted: bool) -> None:
        cell = _cell(position, confidence)
        outcomes, total = self._cells.get(cell, (0.0, 0.0))
        fade = min(1.0, _TABLE_MEMORY / (outcomes + 1.0))
        self._cells[cell] = ((outcomes + 1.0) * fade, (total + accepted) * fade)


@dataclass(slots=True)
class _Correction:
    """Outcomes of one sequence beside what the table expected of them, fading."""

    accepted: float = 0.0
    expected: float = 0.0
    outcomes: float = 0.0

    def apply(self, chance: float) -> float:
        """The chance after multiplying its odds by observed over expected odds."""
        prior = _SEQUENCE_PRIOR
        more, less = prior * chance, prior * (1.0 - chance)
        observed = (self.accepted + more) / (self.outcomes - self.accepted + less)
        table = (self.expected + more) / (self.outcomes - self.expected + less)
        odds = chance / (1.0 - chance) * observed / table
        return odds / (1.0 + odds)

    def record(self, expected: float, accepted: bool) -> None:
        self.accepted = self.accepted * _SEQUENCE_FADE + accepted
        self.expected = self.expected * _SEQUENCE_FADE + expected
        self.outcomes = self.outcomes * _SEQUENCE_FADE + 1.0


@dataclass(slots=True)
class Learner:
    """Acceptance of one drafter's drafts in one sequence; `table` is shared by all sequences."""

    table: AcceptanceTable
    _first: _Correction = field(default_factory=_Correction)
    _later: _Correction = field(default_factory=_Correction)

    def survival(self, confidence: Seq[float | None]) -> list[float]:
        """P(drafts 0..i are all accepted), by position, for drafts of these confidences (None: unknown)."""
        result, product = [], 1.0
        for position, stated in enumerate(confidence):
            product *= self._correction(position).apply(self.table.estimate(position, stated))
            result.append(product)
        return result

    def record(self, position: int, confidence: float | None, accepted: bool) -> None:
        """Draft `position` was (not) accepted, all before it were."""
        self._correction(position).record(self.table.estimate(position, confidence), accepted)
        self.table.record(position, confidence, accepted)
        if confidence is not None:  # for choosing before the drafts and their confidences are known
            self.table.record(position, None, accepted)

    def _correction(self, position: int) -> _Correction:
        return self._first if position == 0 else self._later


def _cell(position: int, confidence: float | None) -> tuple[int, int | None]:
    """Confidences share a cell by tenth, and finer near 1, where odds differ most."""
    if confidence is None:
        tenth = None
    elif confidence < 0.9:
        tenth = int(confidence * 10)
    else:
        tenth = 9 + (confidence >= 0.95) + (confidence >= 0.98)
    return min(position, _LAST_POSITION), tenth
