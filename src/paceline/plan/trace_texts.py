"""A trace read as a probe: what its rounds tell of texts, passes and drafters.

A trace knows only what was tried. At a position where a round began it knows how many drafts were proposed and how
many matched; at the positions that this round accepted, the drafter would have gone on with the rest of the same
drafts. So a draft that was accepted whole counts as ending there, and a drafter that was not asked counts as silent:
what is said of longer drafts is a lower bound. A probe knows all of it.

Passes come from rounds in which nothing was prefilled and every sequence had as many rows; contexts are not kept apart.
Refused: a trace without decode rounds, or with rounds of one width alone, which says nothing of what drafts cost.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.core.records import StepRecord, read_trace
from paceline.errors import UsageError
from paceline.plan.probe_file import DrafterTimes, Drafts, PassTime, ProbeFile, ReplayedText

__all__ = ["probe_of_trace", "texts_of"]

_WITH_MODEL = ("model", "layer-skip")


def probe_of_trace(path: Path, priced: bool = False) -> ProbeFile:
    """The trace as a probe's file; see the module's docstring for what it cannot know.

    priced   passes and drafters will be replaced by those of a probe, so what the trace says of them may be poor
    """
    run, lines = read_trace(path)
    records = list(lines)
    rounds = _rounds(records)
    drafters = tuple(_drafter(name, rounds) for name in sorted({r.drafter for r in records if r.proposed}))
    passes = _passes(rounds)
    if not passes:
        raise UsageError(f"{path} holds no decode rounds; record a run with --trace")
    if drafters and not priced and len({p.width for p in passes}) < 2:
        raise UsageError(f"{path} holds passes of one width alone, which does not tell what drafts cost; give --probe")
    return ProbeFile(
        model=str(run.get("model", path.name)),
        dtype=str(run.get("dtype", "")),
        device="",
        processor="",
        threads=int(run.get("threads", 1)),
        weight_bytes=0,
        seconds=max((r.time_s for r in records), default=0.0),
        passes=passes,
        prefill=(),
        drafters=drafters,
        texts=texts_of(records, [d.name for d in drafters]),
        longest=max((r.proposed for r in records), default=1) or 1,
    )


def texts_of(records: Sequence[StepRecord], drafters: Sequence[str]) -> tuple[ReplayedText, ...]:
    """One text for each choice that has tokens, in the order they began."""
    by_choice: dict[tuple[str, int], list[StepRecord]] = defaultdict(list)
    for record in records:
        by_choice[record.request, record.choice].append(record)
    made = []
    for (request, choice), own in by_choice.items():
        tokens = sum(r.emitted for r in own)
        if tokens:
            decode = [r for r in own if r.kind != "prefill"]
            made.append(
                ReplayedText(
                    task="trace",
                    prompt=f"{request}/{choice}",
                    temperature=own[0].temperature,
                    prompt_tokens=max(own[-1].context + own[-1].emitted - tokens, 0),
                    tokens=tokens,
                    ended=True,
                    loops=False,
                    drafts={name: _along(decode, name, tokens - 1) for name in drafters},
                )
            )
    return tuple(made)


def _along(records: Sequence[StepRecord], name: str, positions: int) -> Drafts:
    proposed, matched = [0] * positions, [0] * positions
    stated: list[tuple[float, ...]] = [()] * positions
    told = all(r.confidence is not None for r in records if r.drafter == name and r.proposed)
    at = 0
    for record in records:
        if record.drafter == name and record.proposed:
            for ahead in range(min(record.accepted + 1, record.proposed, positions - at)):
                proposed[at + ahead] = record.proposed - ahead
                matched[at + ahead] = record.accepted - ahead
                stated[at + ahead] = (record.confidence or ())[ahead : record.accepted + 1]
        at += record.emitted
    return Drafts(tuple(proposed), tuple(matched), tuple(stated) if told else None)


def _rounds(records: Iterable[StepRecord]) -> list[list[StepRecord]]:
    """Rounds in which everything decoded."""
    by_round: dict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        by_round[record.round].append(record)
    return [own for own in by_round.values() if all(r.kind != "prefill" for r in own)]


def _passes(rounds: Iterable[Sequence[StepRecord]]) -> tuple[PassTime, ...]:
    seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
    for own in rounds:
        batch, rows = len(own), own[0].rows
        if rows % batch == 0 and own[0].verify_s + own[0].other_s > 0:
            seconds[batch, rows // batch].append(own[0].verify_s + own[0].other_s)
    return tuple(PassTime(batch, width, 0, tuple(s)) for (batch, width), s in sorted(seconds.items()))


def _drafter(name: str, rounds: Iterable[Sequence[StepRecord]]) -> DrafterTimes:
    """Its price from rounds in which it alone drafted: by drafted token where it has a model, else by round."""
    kind = name.partition(":")[0]
    own = [r for r in rounds if {x.drafter for x in r if x.proposed} == {name}]
    by_token = [r[0].draft_s / max(x.proposed for x in r) for r in own if r[0].draft_s > 0]
    if kind in _WITH_MODEL and by_token:
        return DrafterTimes(name, kind, 0.0, (PassTime(1, 1, 0, tuple(by_token)),))
    by_round = [r[0].draft_s / len(r) for r in own]
    return DrafterTimes(name, kind, statistics.median(by_round) if by_round else 0.0)
