"""A controller that starts from a probe: its cost from timed passes, its survival from replayed texts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from paceline.errors import UsageError
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import QUERY_OVERHEAD, StepTimes
from paceline.plan.control.survival import temperature_range
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import DrafterTimes, ProbeFile

__all__ = ["check_same_engine", "draft_steps", "pass_steps", "teach"]

_MOST_ROWS = 64
_READING = 0.02  # of a step's time, for each token more that a draft reads; a probe times steps alone


def check_same_engine(probe: ProbeFile, dtype: str, weight_bytes: int, threads: int) -> None:
    """Raises UsageError where the probe was made of another model, number format or number of threads."""
    given = {"weights, bytes": weight_bytes, "dtype": dtype, "threads": threads}
    found = {"weights, bytes": probe.weight_bytes, "dtype": probe.dtype, "threads": probe.threads}
    wrong = [f"{name} {found[name]} there and {given[name]} here" for name in given if given[name] != found[name]]
    if wrong:
        raise UsageError(f"the probe is of another engine ({', '.join(wrong)}); probe this one, or run without --probe")


def pass_steps(probe: ProbeFile, batch: int = 1) -> StepTimes:
    """Seconds of a pass by the rows of each of `batch` sequences that are alike."""
    table = PassTable(probe.passes)
    rows = tuple(range(1, _MOST_ROWS // batch + 1)) if batch < _MOST_ROWS // 2 else (1, 2)
    seconds = tuple(table.seconds(batch, r) for r in rows)
    if batch > 1:
        return StepTimes(rows, seconds)
    by_sequence, by_row = table.slopes
    key_s = by_row if by_row > 0 else by_sequence / (1 + QUERY_OVERHEAD)
    return StepTimes(rows, seconds, key_s, _sequence_s(table, key_s))


def _sequence_s(table: PassTable, key_s: float) -> float:
    """What a sequence adds beside rows and keys: rounds of several sequences against one of as many rows."""
    more = []
    for batch in table.batches:
        if batch > 1:
            keys = (batch * (1 + QUERY_OVERHEAD) - (batch + QUERY_OVERHEAD)) * table.base
            more.append((table.seconds(batch, 1) - table.seconds(1, batch) - key_s * keys) / (batch - 1))
    return max(statistics.median(more), 0.0) if more else 0.0


def draft_steps(drafter: DrafterTimes) -> StepTimes | None:
    """Seconds of a drafting step by sequences, and past them of reading tokens; None for a drafter without a model."""
    if not drafter.steps:
        return None
    points = sorted({p.batch: p.median_s for p in drafter.steps}.items())
    batch, seconds = points[-1]
    points.append((batch + _MOST_ROWS, seconds + _MOST_ROWS * _READING * points[0][1]))
    rising: list[float] = []
    for _, seconds in points:
        rising.append(max([seconds, *rising[-1:]]))
    return StepTimes(tuple(b for b, _ in points), tuple(rising))


def teach(controller: Controller, probe: ProbeFile) -> int:
    """Record every outcome of the replay in the tables of the drafters the probe knows; returns how many.

    Texts take turns position by position, so that what fades is old of each alike.
    """
    index = {facts.name: i for i, facts in enumerate(controller.drafters)}
    taught = 0
    for drafter, temperature, position, stated, accepted in _outcomes(probe):
        if drafter in index:
            controller.tables[index[drafter]].record(position, stated, accepted, temperature_range(temperature))
            if stated is not None:  # for choosing before a draft's confidence is known
                controller.tables[index[drafter]].record(position, None, accepted, temperature_range(temperature))
            taught += 1
    return taught


def _outcomes(probe: ProbeFile) -> Iterator[tuple[str, float, int, float | None, bool]]:
    longest = max((t.tokens - 1 for t in probe.texts), default=0)
    for at in range(longest):
        for text in probe.texts:
            for name, drafts in text.drafts.items():
                if at >= len(drafts.proposed):
                    continue
                matched = drafts.matched[at]
                stated = None if drafts.confidence is None else drafts.confidence[at]
                tried = min(matched + 1, drafts.proposed[at], len(drafts.proposed) - at)
                for position in range(tried):
                    told = stated[position] if stated is not None and position < len(stated) else None
                    yield name, text.temperature, position, told, position < matched
