"""A probe as plain data, ready to be shown: curves, prices, acceptance with intervals, advice.

Intervals are 95 %, by bootstrap over texts (rounds of one text are alike); those of a time are the quartiles of its
repeats. What loops is counted, and the gains are given again without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.plan.advice import Advice, Setting, advise, loss_under
from paceline.plan.hindsight import reach
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import DrafterTimes, Drafts, PassTime, ProbeFile, ReplayedText

__all__ = ["BATCHES", "acceptance_rows", "compare_probes", "summarise_probe", "within_context"]

BATCHES = (1, 2, 4, 8, 16)
FREE = 0.1  # a pass this much slower than one row still counts as free
_BANDS = (256, 512, 1024, 2048, 4096)
_RESAMPLES = 200


def summarise_probe(probe: ProbeFile, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """See the module's docstring. Keys are those that `paceline probe --json` prints."""
    table = PassTable(probe.passes)
    known = [b for b in batches if b <= 2 * max(table.batches)]
    return {
        "model": probe.model,
        "dtype": probe.dtype,
        "device": probe.device,
        "processor": probe.processor,
        "threads": probe.threads,
        "versions": dict(probe.versions),
        "seconds": probe.seconds,
        "free_tolerance": FREE,
        "free_rows": table.free_rows(FREE),
        "passes": [_pass_row(p) for p in sorted(probe.passes, key=lambda p: (p.context, p.batch, p.width))],
        "prefill": [{**_pass_row(p), "tokens_per_s": p.rows / p.median_s} for p in probe.prefill],
        "drafters": [_drafter_row(d, table) for d in probe.drafters],
        "texts": _text_rows(probe.texts),
        "acceptance": acceptance_rows(probe),
        "advice": [_advice_row(temperature, group, a) for temperature, group, a in _advice(probe, known)],
    }


def _pass_row(p: PassTime) -> dict[str, Any]:
    low, high = np.quantile(p.seconds, [0.25, 0.75])
    return {
        "batch": p.batch, "width": p.width, "rows": p.rows, "context": p.context, "ms": 1e3 * p.median_s,
        "low_ms": 1e3 * float(low), "high_ms": 1e3 * float(high), "repeats": len(p.seconds),
    }  # fmt: skip


def _drafter_row(drafter: DrafterTimes, table: PassTable) -> dict[str, Any]:
    steps = sorted(drafter.steps, key=lambda p: p.batch)
    return {
        "name": drafter.name,
        "kind": drafter.kind,
        "round_us": 1e6 * drafter.round_s,
        "steps": [
            {"batch": p.batch, "ms": 1e3 * p.median_s, "of_a_pass": p.median_s / table.seconds(p.batch, 1)}
            for p in steps
        ],
    }


def _text_rows(texts: Sequence[ReplayedText]) -> list[dict[str, Any]]:
    rows = []
    for task, temperature in sorted({(t.task, t.temperature) for t in texts}):
        own = [t for t in texts if (t.task, t.temperature) == (task, temperature)]
        rows.append(
            {
                "task": task,
                "temperature": temperature,
                "texts": len(own),
                "tokens": sum(t.tokens for t in own),
                "ended": sum(t.ended for t in own),
                "loops": sum(t.loops for t in own),
            }
        )
    return rows


# -- acceptance --------------------------------------------------------------------------------------------


def acceptance_rows(probe: ProbeFile) -> list[dict[str, Any]]:
    """By drafter: over everything, and by temperature and task, and by temperature and context."""
    rows = []
    for drafter in probe.drafters:
        own = [t for t in probe.texts if drafter.name in t.drafts and t.tokens > 1]
        for temperature in sorted({t.temperature for t in own}):
            mine = [t for t in own if t.temperature == temperature]
            groups: list[tuple[str, str, list[list[Drafts]]]] = [("all", "all", _whole(mine, drafter.name))]
            tasks = sorted({t.task for t in mine})
            groups += [("task", k, _whole([t for t in mine if t.task == k], drafter.name)) for k in tasks]
            groups += [("context", f"up to {high}", bands) for high, bands in _by_context(mine, drafter.name)]
            for by, value, parts in groups:
                head = {"drafter": drafter.name, "temperature": temperature, "by": by, "value": value}
                rows.append({**head, **_rates(parts, probe.longest)})
    return rows


def _whole(texts: Sequence[ReplayedText], name: str) -> list[list[Drafts]]:
    return [[t.drafts[name]] for t in texts]


def _by_context(texts: Sequence[ReplayedText], name: str) -> Iterable[tuple[int, list[list[Drafts]]]]:
    low = 0
    for high in _BANDS:
        parts = [[d] for t in texts if (d := within_context(t, name, low, high)) is not None]
        if parts:
            yield high, parts
        low = high


def within_context(text: ReplayedText, name: str, low: int, high: int) -> Drafts | None:
    """The positions of a text whose rounds begin with more than `low` and at most `high` tokens committed."""
    drafts = text.drafts[name]
    first = min(max(low - text.prompt_tokens, 0), len(drafts.proposed))
    last = min(max(high - text.prompt_tokens, 0), len(drafts.proposed))
    if first >= last:
        return None
    kept = slice(first, last)
    confidence = None if drafts.confidence is None else drafts.confidence[kept]
    return Drafts(drafts.proposed[kept], drafts.matched[kept], confidence)


def _rates(parts: Sequence[Sequence[Drafts]], longest: int) -> dict[str, Any]:
    """Conditional acceptance by depth with its interval, and how often so deep a draft was offered."""
    counts = np.array([reach(part, longest) for part in parts], dtype=float)  # [texts, 3, depths]
    total = counts.sum(axis=0)
    picks = np.random.default_rng(0).multinomial(len(parts), [1 / len(parts)] * len(parts), size=_RESAMPLES)
    drawn = np.einsum("rt,tcd->rcd", picks, counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = drawn[:, 1] / drawn[:, 0]
    positions = sum(len(d.proposed) for part in parts for d in part)
    rows = []
    for depth in range(longest):
        if total[0, depth] == 0:
            break
        seen = draws[:, depth][np.isfinite(draws[:, depth])]
        low, high = np.quantile(seen, [0.025, 0.975]) if len(seen) else (0.0, 1.0)
        rate = float(total[1, depth] / total[0, depth])
        rows.append([rate, min(rate, float(low)), max(rate, float(high)), int(total[0, depth])])
    return {
        "texts": len(parts),
        "positions": positions,
        "acceptance": rows,  # [rate, low, high, outcomes] by depth
        "offered": [float(v) / positions for v in total[2]],
    }


# -- advice ------------------------------------------------------------------------------------------------


def _advice(probe: ProbeFile, batches: Sequence[int]) -> Iterable[tuple[float, str, Advice]]:
    """By temperature: over all texts at every batch, without what loops, and by task at one sequence."""
    for temperature in sorted({t.temperature for t in probe.texts}):
        own = [t for t in probe.texts if t.temperature == temperature and t.tokens > 1]
        if not own:
            continue
        yield from ((temperature, "all", a) for a in advise(probe, own, batches))
        kept = [t for t in own if not t.loops]
        if kept and len(kept) < len(own):
            yield from ((temperature, "without loops", a) for a in advise(probe, kept, batches))
        for task in sorted({t.task for t in own}):
            mine = [t for t in own if t.task == task]
            yield from ((temperature, task, a) for a in advise(probe, mine, (1,)))


def _advice_row(temperature: float, group: str, advice: Advice) -> dict[str, Any]:
    gain = dataclasses.asdict(advice.gain)
    best: dict[str | None, tuple[Setting, float]] = {}
    for setting, value in advice.gains:
        best.setdefault(setting[0], (setting, value))
    return {
        "temperature": temperature,
        "group": group,
        "batch": advice.batch,
        "drafter": advice.setting[0],
        "draft_length": advice.setting[1],
        "gain": gain["value"],
        "low": gain["low"],
        "high": gain["high"],
        "regret": advice.regret,
        "oracle": advice.oracle,
        "by_drafter": [
            {"drafter": name, "draft_length": setting[1], "gain": value}
            for name, (setting, value) in best.items()
            if name is not None
        ],
        "by_length": [
            {"drafter": name, "draft_length": length, "gain": value} for (name, length), value in advice.gains
        ],
    }


def compare_probes(first: ProbeFile, second: ProbeFile, batches: Sequence[int] = BATCHES) -> list[dict[str, Any]]:
    """By temperature and batch of both: what each one's setting loses under the other, beside the other's regret."""
    rows = []
    for temperature in sorted({t.temperature for t in first.texts} & {t.temperature for t in second.texts}):
        known = [b for b in batches if b <= 2 * max(PassTable(p.passes).batches[-1] for p in (first, second))]
        one, other = (
            advise(p, [t for t in p.texts if t.temperature == temperature], known) for p in (first, second)
        )
        forward, back = loss_under(one, other), loss_under(other, one)
        for a, b in zip(one, other, strict=True):
            rows.append(
                {
                    "temperature": temperature,
                    "batch": a.batch,
                    "first": list(a.setting),
                    "second": list(b.setting),
                    "second_loses_under_first": forward.get(a.batch),
                    "first_regret": a.regret,
                    "first_loses_under_second": back.get(a.batch),
                    "second_regret": b.regret,
                }
            )
    return rows
