"""A benchmark as plain data, ready to be shown: pure functions of its blocks and of what was measured beside them.

Ratios are arm over plain decoding, by prompt, with a 95 % interval over prompts; throughput is tokens of all answers
over the wall time of the blocks, its ratio by block. `best_fixed` is fair to the fixed arms: on one half of the
prompts the best is picked, on the other the controller is held against it, and the other way round.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.bench.bench_run import AUTO, PLAIN, ArmSpec, BlockResult
from paceline.bench.paired import (
    Ratio,
    Run,
    bootstrap_interval,
    first_speed,
    geometric_mean,
    paired_ratio,
    prompt_ratios,
)
from paceline.bench.speed_report import MIX, looping_prompts, partings, summarise_arm
from paceline.plan.advice import draft_costs
from paceline.plan.hindsight import oracle_rounds, seconds_of
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import ProbeFile

__all__ = ["summarise_bench"]

Load = tuple[float, int, str]  # temperature, concurrency, pool
_BUCKET = 8  # output tokens
_LEAST_ROUNDS = 3


def summarise_bench(
    results: Sequence[BlockResult],
    arms: Sequence[ArmSpec],
    setup: Mapping[str, Any],
    probe: ProbeFile | None = None,
    gap: Callable[[Run, int], float | None] = lambda run, index: None,
) -> dict[str, Any]:
    """See the module's docstring. `gap` tells how wide a text parts from plain's at a token; None: not known."""
    names = [a.name for a in arms]
    base = PLAIN if PLAIN in names else names[0]
    runs = [run for result in results for run in result.runs]
    parted = partings(runs, base)
    return {
        "setup": dict(setup),
        "base": base,
        "arms": [{"name": a.name, "drafter": a.drafter, "draft_length": a.draft_length} for a in arms],
        "cells": [cell for load in _loads(runs) for cell in _cells(results, load, names, base)],
        "best_fixed": [row for load in _loads(runs) for row in _best_fixed(runs, load, arms, base)],
        "oracle": [] if probe is None else _oracle(runs, probe, names, base),
        "positions": _positions(runs, names),
        "parts": _parts(results, names),
        "lengths": _lengths(runs, names),
        "predicted": None if probe is None else _predicted(results, arms, probe),
        "partings": [_parting(run, index, gap(run, index)) for run, index in parted],
        "notes": _notes(runs, names, base),
    }


def _load(run: Run) -> Load:
    return run.key.temperature, run.key.concurrency, run.key.pool


def _loads(runs: Iterable[Run]) -> list[Load]:
    return sorted({_load(run) for run in runs})


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "prompts": ratio.prompts}


# -- cells -------------------------------------------------------------------------------------------------


def _cells(results: Sequence[BlockResult], load: Load, names: Sequence[str], base: str) -> list[dict[str, Any]]:
    own = [r for r in results if _load(r.runs[0]) == load]
    kinds = list(dict.fromkeys(r.key.kind for r in own))
    groups = [(k, [r for r in own if r.key.kind == k]) for k in kinds]
    if len(kinds) > 1:
        groups.append((MIX, own))
    return [
        _cell(kind, group, load, arm, base)
        for kind, group in groups
        for arm in names
        if any(r.key.arm == arm for r in group)
    ]


def _cell(kind: str, group: Sequence[BlockResult], load: Load, arm: str, base: str) -> dict[str, Any]:
    runs = [run for result in group for run in result.runs]
    looping = looping_prompts(runs)
    kept = [r for r in runs if (r.key.kind, r.key.prompt) not in looping]
    whole = summarise_arm(runs, arm, base)
    return {
        "temperature": load[0],
        "concurrency": load[1],
        "pool": load[2],
        "kind": kind,
        "arm": arm,
        "prompts": whole.prompts,
        "loops": len(looping),
        "user_tokens_per_s": whole.tokens_per_s,
        "tokens_per_s": _throughput([r for r in group if r.key.arm == arm]),
        "ratio": _ratio(paired_ratio(runs, arm, base)),
        "ratio_without_loops": _ratio(paired_ratio(kept, arm, base)),
        "throughput_ratio": _throughput_ratio(group, arm, base),
        "first_ms": None if whole.first_s is None else 1e3 * whole.first_s,
        "first_ratio": _ratio(paired_ratio(runs, arm, base, first_speed)),
        "acceptance_length": whole.acceptance_length,
        "tokens_per_round": whole.tokens_per_round,
        "saved": _saved(group, arm, base),
        "same": whole.same,
        "compared": whole.compared,
    }


def _saved(results: Sequence[BlockResult], arm: str, base: str) -> dict[str, float] | None:
    """Seconds saved over all blocks: by the base's blocks of the same prompts, and as reckoned live; None where no
    controller did."""
    plain = {r.key.pair: r.times.wall_s for r in results if r.key.arm == base}
    own = [r for r in results if r.key.arm == arm and r.key.pair in plain and r.times.saved_s is not None]
    if not own or arm == base:
        return None
    paired = sum(plain[r.key.pair] - r.times.wall_s for r in own)
    return {"paired_s": paired, "live_s": sum(r.times.saved_s or 0.0 for r in own)}


def _throughput(results: Sequence[BlockResult]) -> float | None:
    wall = sum(r.times.wall_s for r in results)
    return sum(r.times.tokens for r in results) / wall if wall > 0 else None


def _throughput_ratio(group: Sequence[BlockResult], arm: str, base: str) -> dict[str, Any]:
    """By block; geometric mean over kinds and blocks, its interval over them."""
    rates: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for r in group:
        if r.key.arm in (arm, base) and r.times.wall_s > 0:
            rates[r.key.pair][r.key.arm] = r.times.tokens / r.times.wall_s
    values = [both[arm] / both[base] for both in rates.values() if arm in both and base in both]
    if not values:
        return _ratio(Ratio(0, None, None, None))
    low, high = bootstrap_interval(values, 0, resamples=1000) if len(values) > 1 else (None, None)
    return _ratio(Ratio(len(values), geometric_mean(values), low, high))


def _best_fixed(
    runs: Sequence[Run], load: Load, arms: Sequence[ArmSpec], base: str
) -> list[dict[str, Any]]:
    """The controller over the best fixed arm, plain among them; see the module's docstring."""
    fixed = [a.name for a in arms if a.draft_length is not None]
    if AUTO not in [a.name for a in arms] or len(fixed) < 2:
        return []
    own = [r for r in runs if _load(r) == load]
    prompts = sorted({(r.key.kind, r.key.prompt) for r in own})
    halves = [set(prompts[i::2]) for i in range(2)]
    picked, values = [], []
    for first, second in (halves, halves[::-1]):
        ratios = {name: prompt_ratios(own, name, base) for name in fixed if name != base}
        means = {name: _mean([v for key, v in found.items() if key in first]) for name, found in ratios.items()}
        best = max([base, *means], key=lambda name: means.get(name, 1.0))
        picked.append(best)
        values += [v for key, v in prompt_ratios(own, AUTO, best).items() if key in second]
    if not values:
        return []
    low, high = bootstrap_interval(values, 0) if len(values) > 1 else (None, None)
    ratio = Ratio(len(values), geometric_mean(values), low, high)
    return [{"temperature": load[0], "concurrency": load[1], "pool": load[2], "picked": picked, **_ratio(ratio)}]


def _mean(values: Sequence[float]) -> float:
    return geometric_mean(values) if values else 0.0


# -- rounds ------------------------------------------------------------------------------------------------


def _positions(runs: Iterable[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Accepted drafts by position, of those put to the test."""
    counts: dict[tuple[str, float], dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for run in runs:
        cell = counts[run.key.arm, run.key.temperature]
        for length, kept in zip(run.sample.lengths, run.sample.kept, strict=True):
            for position in range(min(length, kept + 1)):
                cell[position][0] += 1
                cell[position][1] += kept > position
    return [
        {"arm": arm, "temperature": t, "acceptance": [[kept / n, n] for n, kept in (v[p] for p in sorted(v))]}
        for (arm, t), v in sorted(counts.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
        if v
    ]


def _parts(results: Sequence[BlockResult], names: Sequence[str]) -> list[dict[str, Any]]:
    """Milliseconds of a decoding round by part, by arm and concurrency."""
    rows = []
    for arm in names:
        for concurrency in sorted({r.key.concurrency for r in results}):
            own = [r for r in results if (r.key.arm, r.key.concurrency) == (arm, concurrency)]
            rounds = [x for r in own for x in r.times.rounds]
            n = sum(x.count for x in rounds)
            if n:
                rows.append(
                    {
                        "arm": arm,
                        "concurrency": concurrency,
                        "rounds": n,
                        "target_ms": 1e3 * sum(x.target_s for x in rounds) / n,
                        "draft_ms": 1e3 * sum(x.draft_s for x in rounds) / n,
                        "other_ms": 1e3 * sum(x.other_s for x in rounds) / n,
                    }
                )
    return rows


def _lengths(runs: Iterable[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Mean drafts proposed and accepted in a round, along the answer: [output tokens, proposed, accepted, rounds]."""
    sums: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for run in runs:
        done = 1
        for length, kept in zip(run.sample.lengths, run.sample.kept, strict=True):
            cell = sums[run.key.arm][done // _BUCKET * _BUCKET]
            cell[0], cell[1], cell[2] = cell[0] + length, cell[1] + kept, cell[2] + 1
            done += kept + 1
    return [
        {"arm": arm, "points": [[at, p / n, a / n, n] for at, (p, a, n) in sorted(sums[arm].items())]}
        for arm in names
        if arm in sums
    ]


def _predicted(results: Sequence[BlockResult], arms: Sequence[ArmSpec], probe: ProbeFile) -> dict[str, Any]:
    """Rounds of plain and fixed arms against the table of passes and the price of drafts of the same minutes, as
    ratios to plain rounds of one sequence where there are any. Rounds whose sequences drafted unequally are left out.
    """
    sums: dict[tuple[int, int, str | None], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    by_name = {a.name: a for a in arms}
    for result in results:
        arm = by_name[result.key.arm]
        for x in result.times.rounds if arm.draft_length is not None else ():
            if x.rows == x.batch * (1 + x.drafted):
                cell = sums[x.batch, x.drafted, arm.drafter if x.drafted else None]
                for i, value in enumerate((x.target_s + x.draft_s + x.other_s, x.count, x.count * x.context)):
                    cell[i] += value
    table = PassTable(probe.passes)
    points: list[dict[str, Any]] = []
    for shape in sorted(sums, key=lambda s: (s[0], s[1], str(s[2]))):
        (batch, drafted, drafter), (seconds, count, contexts) = shape, sums[shape]
        context = contexts / count
        cost = table.seconds(batch, 1, context)
        if drafter is not None:
            cost = draft_costs(probe, table, batch, context)[drafter](drafted)
        points.append(
            {"batch": batch, "drafted": drafted, "drafter": drafter, "rounds": int(count), "context": context,
             "measured_ms": 1e3 * seconds / count, "predicted_ms": 1e3 * cost}
        )  # fmt: skip
    one = next((p for p in points if (p["batch"], p["drafted"]) == (1, 0)), None)
    for p in points:
        if one is not None:
            measured, predicted = (p[k] / one[k] for k in ("measured_ms", "predicted_ms"))
            p |= {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
    errors = [abs(p["error"]) for p in points if "error" in p and p is not one]
    return {"points": points, "median_error": statistics.median(errors) if errors else None}


def _oracle(runs: Sequence[Run], probe: ProbeFile, names: Sequence[str], base: str) -> list[dict[str, Any]]:
    """One sequence at a time: the gain if every accepted length were known, and the share of it each arm reached."""
    table = PassTable(probe.passes)
    gains: dict[tuple[float, str], list[float]] = defaultdict(list)
    for text in probe.texts:
        if text.tokens > 1:
            context = text.prompt_tokens + text.tokens / 2
            costs, plain = draft_costs(probe, table, 1, context), table.seconds(1, 1, context)
            seconds = seconds_of(oracle_rounds(text, plain, costs), plain, costs)
            gain = math.log((text.tokens - 1) * plain / seconds)
            for kind in (text.task, MIX):
                gains[text.temperature, kind].append(gain)
    rows = []
    for (temperature, kind), logs in gains.items():
        own = [r for r in runs if (r.key.temperature, r.key.concurrency) == (temperature, 1)]
        own = [r for r in own if kind in (MIX, r.key.kind)]
        bound = math.exp(sum(logs) / len(logs))
        reached = {a: paired_ratio(own, a, base).mean for a in names if a != base}
        shares = {a: v / bound for a, v in reached.items() if v is not None}
        rows.append({"temperature": temperature, "kind": kind, "gain": bound, "reached": shares})
    return sorted(rows, key=lambda r: (r["temperature"], r["kind"] == MIX))


# -- texts -------------------------------------------------------------------------------------------------


def _parting(run: Run, index: int, gap: float | None) -> dict[str, Any]:
    k = run.key
    return {
        "kind": k.kind, "prompt": k.prompt, "arm": k.arm, "round": k.round, "concurrency": k.concurrency,
        "temperature": k.temperature, "pool": k.pool, "token": index, "gap": gap,
    }  # fmt: skip


def _notes(runs: Sequence[Run], names: Sequence[str], base: str) -> list[str]:
    notes = []
    rounds = len({r.key.round for r in runs})
    if rounds < _LEAST_ROUNDS:
        notes.append(f"{rounds} rounds: intervals tell how prompts differ, not how one prompt's runs do (3 or more do)")
    if any(r.sample.text is not None for r in runs):
        notes.append("a server's answers are compared as text, and its tokens are those it counts itself")
        times = max(Counter((r.key.arm, r.key.kind, r.key.prompt) for r in runs).values())
        if times > 1:
            notes.append(
                f"prompts were asked {times} times: a server may have drafted from its own earlier answers, or kept "
                "the prompt; to leave that out, start it anew for one --concurrency and --rounds 1"
            )
    looping = looping_prompts(runs)
    if looping:
        notes.append(f"{len(looping)} prompts have an output that loops; every ratio is given without them too")
    paying = [a for a in names if a != base and (_over(runs, a, base) or 0.0) > 1.0]
    if len(names) > 1 and not paying:
        notes.append(f"nothing here is faster than {base}: run that")
    return notes


def _over(runs: Sequence[Run], arm: str, base: str) -> float | None:
    return paired_ratio(runs, arm, base).mean

