"""The parts of a plan as plain JSON values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paceline.plan.document import as_json
from paceline.plan.frontier import Answer, Candidate, Point
from paceline.plan.memory import max_batch, memory_use
from paceline.plan.regret import verdict_of
from paceline.plan.residuals import Spread
from paceline.plan.rounds import target_cost
from paceline.plan.scenario import Scenario
from paceline.plan.schedule import Band, make_schedule

__all__ = [
    "answer_section",
    "candidate_section",
    "memory_section",
    "operator_section",
    "point_section",
    "scenario_section",
    "schedule_section",
    "thin",
]


def scenario_section(s: Scenario) -> dict[str, Any]:
    return {
        "model": s.shape.name,
        "parameters": s.shape.parameters,
        "active_parameters": s.shape.active_parameters,
        "model_source": s.shape.source,
        "hardware": s.hardware.title,
        "hardware_source": s.hardware.source,
        "devices": s.devices,
        "replicas": s.replicas,
        "tp": s.layout.tensor,
        "ep": s.layout.expert,
        "linear": s.precision.linear,
        "experts": s.precision.experts,
        "kv": s.precision.kv,
        "context_tokens": s.load.prompt_tokens,
        "output_tokens": s.load.output_tokens,
        "constants": dataclasses.asdict(s.priced_by),
    }


def candidate_section(c: Candidate) -> dict[str, Any]:
    longest = int(c.grid.lengths[-1])
    a = c.acceptance
    return {
        "mechanism": c.mechanism.label,
        "kind": c.mechanism.kind,
        "name": c.mechanism.name,
        "proposed_share": c.mechanism.proposed_share,
        "longest": longest,
        "acceptance": None
        if a is None
        else {
            "conditional": [float(x) for x in a.at(float(c.grid.contexts[0]))],
            "length": [as_json(a.estimate(d, float(c.grid.contexts[0]))) for d in range(1, longest + 1)],
            "source": a.source,
            "temperature": a.temperature,
        },
        "by_batch": _by_batch(c),
        "fits": {"batch_at_longest": int(c.limits[-1, 0]), "batch_without_drafts": int(c.limits[0, 0])},
    }


def point_section(p: Point) -> dict[str, Any]:
    return {
        "mechanism": p.mechanism, "batch": p.batch, "draft_length": p.draft_length, "user": as_json(p.user),
        "device": as_json(p.device), "first_token": as_json(p.first_token),
        "acceptance_length": p.acceptance_length, "round_ms": p.round_ms,
    }  # fmt: skip


def answer_section(a: Answer) -> dict[str, Any]:
    return {
        "best": point_section(a.best),
        "runner_up": None if a.runner_up is None else point_section(a.runner_up),
        "limit": a.limit,
    }


def thin(points: list[Point], most: int = 80) -> list[Point]:
    if len(points) <= most:
        return points
    picked = sorted({round(i * (len(points) - 1) / (most - 1)) for i in range(most)})
    return [points[i] for i in picked]


def operator_section(c: Candidate, answer: Answer) -> list[dict[str, Any]]:
    best, s = answer.best, c.scenario
    width = c.mechanism.widths(float(best.draft_length))
    parts = target_cost(s, float(best.batch), width, s.load.mean_context).by_operator_s
    found = [{"operator": k, "ms": float(np.asarray(v).ravel()[0]) * 1e3} for k, v in parts.items()]
    i = int(np.argmin(np.abs(c.grid.batches - best.batch)))
    if best.draft_length:
        d = int(np.flatnonzero(c.grid.lengths == best.draft_length)[0])
        found.append({"operator": "drafting", "ms": float(c.grid.draft_s[i, d, 0] * 1e3)})
        found.append(
            {
                "operator": "speculative round",
                "ms": float(c.mechanism.rounds(best.batch, 1)) * s.priced_by.round_s * 1e3,
            }
        )
    return sorted(found, key=lambda row: -float(str(row["ms"])))


def memory_section(c: Candidate, answer: Answer) -> dict[str, Any]:
    use = memory_use(c.scenario, c.mechanism, answer.best.draft_length, c.scenario.load.mean_context)
    return {k: getattr(use, k) for k in type(use).__slots__} | {
        "sequences_that_fit": max_batch(
            c.scenario, c.mechanism, answer.best.draft_length, c.scenario.load.mean_context
        )
    }


def schedule_section(c: Candidate, edges: list[float | None], spread: Spread) -> list[dict[str, Any]]:
    bands = make_schedule(c.grid, limits=c.limits, edges=edges)
    found: list[dict[str, Any]] = []
    for band in bands[1:] or bands:
        entries = [_entry_json(c, band, e, spread) for e in band.entries]
        same = found and [(e["first"], e["last"], e["length"]) for e in found[-1]["entries"]] == [
            (e["first"], e["last"], e["length"]) for e in entries
        ]
        if same:
            found[-1]["context_up_to"] = band.context_up_to
        else:
            found.append({"context_up_to": band.context_up_to, "context": band.context, "entries": entries})
    return found


def _entry_json(c: Candidate, band: Band, e: Any, spread: Spread) -> dict[str, Any]:
    context = int(np.argmin(np.abs(c.grid.contexts - band.context)))
    middle = int(np.argmin(np.abs(c.grid.batches - (e.first * e.last) ** 0.5)))
    expected, chance = verdict_of(c, middle, context, e.length, spread)
    gain = float(c.grid.speedup[middle, np.flatnonzero(c.grid.lengths == e.length)[0], context])
    # What D = 0 inside a speculative server keeps of the plain engine's speed there.
    idle = float(c.grid.plain_s[middle, 0, context] / c.grid.idle_s[middle, 0, context])
    return {
        **dataclasses.asdict(e),
        "expected_regret": expected,
        "chance_best": chance,
        "gain": gain,
        "idle_speed": idle,
    }


def _by_batch(c: Candidate) -> list[dict[str, Any]]:
    """The best length and what a round costs, at a few batches."""
    probes = (8, 32, 128, c.grid.batches[-1])
    rows = sorted({0, *(int(np.argmin(np.abs(c.grid.batches - b))) for b in probes)})
    table = []
    for i in rows:
        best = int(np.argmax(c.grid.speedup[i, :, 0]))
        table.append(
            {
                "batch": int(c.grid.batches[i]),
                "best_length": int(c.grid.lengths[best]),
                "speedup": float(c.grid.speedup[i, best, 0]),
                "cost_ratio": float(c.grid.cost_ratio[i, best, 0]),
                "round_ms": float(c.grid.round_s[i, best, 0] * 1e3),
                "plain_ms": float(c.grid.plain_s[i, 0, 0] * 1e3),
                "idle_ms": float(c.grid.idle_s[i, 0, 0] * 1e3),
                "draft_ms": float(c.grid.draft_s[i, best, 0] * 1e3),
            }
        )
    return table
