"""The last word of the controller: does drafting pay at all, for as many sequences as run now?

Every choice is made from estimates, and what asking, weighing and telling takes is spent before it (and leaves the
caches colder for the pass). Where many sequences run and drafts bring little, that time and small errors of the prices
can be more than what is gained, and the books do not show it, as they are kept at the same prices. So where the books
show less than `_HARDLY`, a few plain rounds are run, in which nobody is asked, and seconds by token are compared as
measured; what was quicker goes on, the other is tried again after a while, twice as long each time.

A round is measured against a plain one of the same sequences at the prices of the start, which even out numbers and
contexts, and are the same for both. Batches under `FEWEST` are left alone: there a good draft outweighs many asks, and
a matcher that brings nothing is asked seldom.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

__all__ = ["FEWEST", "Guard"]

FEWEST = 4
_HARDLY = 0.15  # of a plain round, gained by the books; their prices are right within that
_MARGIN = 0.01  # by which plain rounds have to be quicker
_TRIAL, _AGAIN = 32, 16  # rounds with drafts before they are judged, and after a pause
_LOOK, _UNSETTLED = 10, 2  # plain rounds to compare with, and how many of them do not count
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 512
_FIRST_STRETCH, _LONGEST_STRETCH = 256, 2048
_FADE = 0.98
_GAIN_SHARE = 0.03


@dataclass(slots=True)
class _Score:
    """Seconds of rounds, and of plain rounds for the same tokens at the prices of the start; old ones fade."""

    took: float = 0.0
    made: float = 0.0

    def add(self, took: float, made: float) -> None:
        self.took, self.made = self.took * _FADE + took, self.made * _FADE + made

    @property
    def pace(self) -> float:
        return self.took / self.made


@dataclass(slots=True)
class _Book:
    """Of batches of one size: whether they may draft, rounds left before the next decision, and what it rests on."""

    is_open: bool = True
    looking: bool = False  # plain rounds to compare with; else those of a pause
    left: int = _TRIAL
    gain: float = 0.0
    drafting: _Score = field(default_factory=_Score)
    plain: _Score = field(default_factory=_Score)
    pause: int = _FIRST_PAUSE
    stretch: int = _FIRST_STRETCH

    def add_open(self, took: float, made: float, gain: float) -> None:
        self.drafting.add(took, made)
        self.gain += _GAIN_SHARE * (gain - self.gain)
        if self.left <= 0 and self.gain < _HARDLY:
            self.is_open, self.looking, self.left, self.plain = False, True, _LOOK, _Score()

    def add_plain(self, took: float, made: float) -> None:
        if self.looking and self.left < _LOOK - _UNSETTLED:
            self.plain.add(took, made)
        if self.left > 0:
            return
        if not self.looking:
            self.try_again()
        elif self.plain.pace * (1.0 + _MARGIN) < self.drafting.pace:
            self.looking, self.left = False, self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        else:
            self.is_open, self.left, self.pause = True, self.stretch, _FIRST_PAUSE
            self.stretch = min(2 * self.stretch, _LONGEST_STRETCH)

    def try_again(self) -> None:
        self.is_open, self.left, self.drafting, self.stretch = True, _AGAIN, _Score(), _FIRST_STRETCH


class Guard:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._books: dict[int, _Book] = {}

    def is_open(self, sequences: int) -> bool:
        """Whether so many sequences may draft in the next round."""
        return sequences < FEWEST or self._book(sequences).is_open

    def add(self, emitted: Seq[int], took: float, plain_s: float, gain: float) -> None:
        """A round of `FEWEST` sequences or more, without prompts; each emitted so many tokens. It `took` so many
        seconds, a plain one `plain_s` at the prices of the start; `gain` is what the books say was gained, in plain
        rounds."""
        book = self._book(len(emitted))
        book.left -= 1
        if book.is_open:
            book.add_open(took, plain_s * sum(emitted) / len(emitted), gain)
        else:
            book.add_plain(took, plain_s)

    def rest(self) -> None:
        """No sequence is left; what comes may be of another kind."""
        for book in self._books.values():
            if not book.is_open:
                book.try_again()

    def _book(self, sequences: int) -> _Book:
        """Numbers of sequences share one by powers of two."""
        size = sequences.bit_length()
        if size not in self._books:
            self._books[size] = _Book()
        return self._books[size]
