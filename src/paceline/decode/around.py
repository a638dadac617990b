"""What a round takes beside its target pass: rows laid out, verdicts, commits, text. Python's time, for the most part.

Timed in an engine of its own over the same model, with short texts: what surrounds a pass depends on its sequences and
rows, hardly on contexts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.core.proposal import Proposal, Verdict
from paceline.core.records import StepRecord
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.model.base import TargetModel
from paceline.decode.sequence import DraftSettings, Request
from paceline.plan.control.cost import Around

__all__ = ["Told", "time_around"]

_DRAFTS = 1  # of every sequence in the rounds that tell what a row adds


class Told:
    """A drafter that says `length` tokens, most likely wrong ones: for rounds of a known shape."""

    name, needs = "told", Needs()

    def __init__(self) -> None:
        self.length = 0

    def begin(self, view: SequenceView) -> None: ...

    def end(self, view: SequenceView) -> None: ...

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None: ...

    def check_idle(self) -> None: ...

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [
            Proposal.chain([5 + i for i in range(min(budget, self.length))], self.name)
            for _, budget in zip(views, budgets, strict=True)
        ]


def time_around(
    model: TargetModel, sequences: int, rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> Around:
    """Medians of `rounds` rounds of each shape: `sequences` of them with a draft and without, and one alone."""
    drafter, tokens = Told(), 4 + (1 + _DRAFTS) * (3 * rounds + 3)
    records: list[StepRecord] = []
    engine = Engine(
        model,
        vocab_size=model.vocab_width,
        drafters={"told": drafter},
        options=EngineOptions(max_batch=sequences, max_context=min(tokens + 1, model.max_positions)),
        on_record=records.append,
        clock=clock,
    )
    settings = DraftSettings("told", draft_length=_DRAFTS)
    for place in range(sequences):
        engine.add(Request(str(place), (0,), SamplingParams(max_tokens=tokens), settings))

    def timed(length: int, count: int) -> float:
        drafter.length = length
        took = []
        for _ in range(count):
            records.clear()
            engine.step()
            took.append(records[0].other_s)
        return statistics.median(took)

    timed(0, 2)  # the prompts, and a round to warm up
    drafting, plain = timed(_DRAFTS, rounds), timed(0, rounds)
    for place in range(1, sequences):
        engine.cancel(str(place))
    alone = timed(0, 1 + rounds)
    engine.cancel("0")
    while engine.has_work:
        engine.step()
    return _solve(sequences, drafting, plain, alone)


def _solve(sequences: int, drafting: float, plain: float, alone: float) -> Around:
    """From rounds of `sequences` with `_DRAFTS` drafts each and with none, and of one without; nothing below 0."""
    row_s = max(drafting - plain, 0.0) / (_DRAFTS * sequences)
    sequence_s = max((plain - alone) / (sequences - 1) - row_s, 0.0) if sequences > 1 else 0.0
    return Around(max(alone - sequence_s - row_s, 0.0), sequence_s, row_s)
