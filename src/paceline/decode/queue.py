"""Which sequences run: admitted in the order of their arrival, as lanes and memory allow.

A sequence that runs may always write its next rows: where blocks are missing, prefixes yield first, then the
youngest sequences. One that yields gives all its memory back, waits in its old place and is computed again from its
committed tokens when there is room. The oldest never yields, so everything comes to its end. For drafts prefixes yield,
sequences do not: where memory is short a draft ends with the last block.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.decode.draft.base import Drafter
from paceline.decode.draft.build import begin
from paceline.decode.room import Room
from paceline.decode.sequence import Phase, Sequence

__all__ = ["Queue"]


class Queue:
    """`waiting` and `running` sequences; at most `lanes` run. `preemptions` counts those that yielded, ever.

    max_draft    draft tokens a round where the drafter chooses
    drafter_of   who drafts for a sequence
    """

    def __init__(
        self, room: Room, lanes: int, max_draft: int, drafter_of: Callable[[Sequence], Drafter | None]
    ) -> None:
        self.room, self.lanes, self.max_draft, self.drafter_of = room, lanes, max_draft, drafter_of
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def admit(self) -> None:
        """Begin, or resume, waiting sequences; who does not fit yet holds back those behind it."""
        for sequence in list(self.waiting):
            if len(self.running) == self.lanes:
                return
            if self._awaits_sibling(sequence):
                continue
            drafter = self.drafter_of(sequence)
            layers = () if drafter is None else drafter.needs.hidden_layers
            shared = self.room.admit(sequence, self.running, layers)
            if shared is None:
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.start(shared)
            if drafter is not None:
                begin(drafter, sequence.view, sequence.request.draft.drafter)

    def make_room(self) -> None:
        """Blocks for the next rows of every running sequence, the oldest first; the youngest yield."""
        for sequence in sorted(self.running, key=_arrival):
            while sequence.slot is not None and not self.room.grow(sequence.slot, self._next_end(sequence)):
                self._preempt(max(self.running, key=_arrival))
        for sequence in self.running:
            if sequence.phase is Phase.DECODE:
                assert sequence.slot is not None
                wanted = self._next_end(sequence) + self._draft_rows(sequence)
                self.room.grow(sequence.slot, min(wanted, self.room.cache.limit))

    def _draft_rows(self, sequence: Sequence) -> int:
        settings = sequence.request.draft
        if self.drafter_of(sequence) is None:
            return 0
        asked = self.max_draft if settings.draft_length is None else settings.draft_length
        return settings.tree_size or min(asked, max(sequence.room - 1, 0))

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether another choice of its request is in the prompt: it starts behind that one's prompt."""
        return self.room.sharable(len(sequence.tokens) - 1) > 0 and any(
            s.request is sequence.request and s.phase is Phase.PREFILL for s in self.running
        )

    def _next_end(self, sequence: Sequence) -> int:
        """Cached tokens after the next pass, drafts aside."""
        assert sequence.slot is not None
        held = self.room.cache.committed(sequence.slot)
        return held + (1 if sequence.phase is Phase.DECODE else len(self.room.next_chunk(sequence, held)))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if (drafter := self.drafter_of(sequence)) is not None:
            sequence.view.preempted = True
            drafter.end(sequence.view)
            sequence.view.preempted = False
        sequence.view.hidden = {}
        self.room.leave(sequence, useful=False)
        sequence.phase = Phase.WAITING
        sequence.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.append(sequence)
        self.waiting.sort(key=_arrival)


def _arrival(sequence: Sequence) -> int:
    return sequence.view.key
