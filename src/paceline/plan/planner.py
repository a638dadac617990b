"""From a request to a plan: reads nothing but the tables and files it is given, decides, and writes down
why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan import guidelines
from paceline.plan.acceptance import Acceptance
from paceline.plan.calibration import Calibration, calibrated_spread
from paceline.plan.config import find_model
from paceline.plan.constants import prior_constants
from paceline.plan.cost import Layout, Precision
from paceline.plan.document import SCHEMA, Plan, as_json
from paceline.plan.frontier import Answer, Candidate, break_even, candidate, envelope, service_level
from paceline.plan.hardware import find_hardware
from paceline.plan.importers import read_acceptance
from paceline.plan.mechanisms import KINDS, Mechanism
from paceline.plan.memory import max_batch
from paceline.plan.notes import MIN_GAIN, plan_notes
from paceline.plan.pictures import pictures
from paceline.plan.residuals import Spread, validated_spread
from paceline.plan.scenario import Load, Scenario
from paceline.plan.sections import (
    answer_section,
    candidate_section,
    memory_section,
    operator_section,
    point_section,
    scenario_section,
    schedule_section,
    thin,
)

__all__ = ["PlanRequest", "make_plan", "mechanisms_of", "parse_draft", "scenario_of"]

_CONTEXT_EDGES = (2048.0, 8192.0, 32768.0)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the command line asks, field by flag. `drafts` pairs a mechanism with its acceptance, as
    written.
    """

    model: str
    hardware: str
    devices: int = 1
    tensor: int = 1
    expert: int = 1
    dtype: str = "bf16"
    kv_dtype: str | None = None
    context_tokens: float = 2048
    output_tokens: float = 512
    drafts: tuple[tuple[str, str | None], ...] = ()
    survival: bool = False
    longest: int = 8
    min_tokens_per_user: float | None = None
    max_ttft: float | None = None
    concurrency: int | None = None
    utilisation: float = 0.9
    draft_dtype: str = "bf16"
    engine: str = "any"
    calibration: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> PlanRequest:
        """From a plan's `request`."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(data) - known:
            raise InvalidParameter("request", sorted(unknown), f"the fields {sorted(known)}")
        return cls(**{**data, "drafts": tuple((d[0], d[1]) for d in data.get("drafts", ()))})


@dataclass(frozen=True, slots=True)
class _Work:
    request: PlanRequest
    scenario: Scenario
    spread: Spread
    candidates: list[Candidate]
    warnings: list[str] = field(default_factory=list)


def parse_draft(text: str, dtype: str = "bf16") -> Mechanism:
    """KIND or KIND:MODEL; a bare name or path means model:. For ngram and suffix, MODEL may be a share,
    0.4.
    """
    kind, _, name = text.partition(":")
    if kind == "auto":
        raise InvalidParameter(
            "draft", text, "a mechanism; `auto` chooses at run time, a plan compares the ones named"
        )
    if kind in ("ngram", "suffix") and name:
        try:
            return Mechanism(kind, proposed_share=float(name))
        except ValueError:
            raise InvalidParameter(
                "draft", text, f"{kind} or {kind}:SHARE, the share of rounds that propose"
            ) from None
    if kind == "model" or (kind not in KINDS and not name):
        target = name or text
        shown = target.rpartition("#model:")[2]  # of a probe's draft model its own path
        return Mechanism("model", model=find_model(target), name=shown, dtype=dtype)
    return Mechanism(kind, name=name or None, dtype=dtype)


def make_plan(request: PlanRequest) -> Plan:
    """The whole plan; raises `Infeasible` where nothing fits or the service level cannot be met."""
    if request.longest < 1 or request.longest > 64:
        raise InvalidParameter("longest draft length", request.longest, "a whole number from 1 to 64")
    scenario = scenario_of(request)
    shape = scenario.shape
    calibration = Calibration.of(request.calibration) if request.calibration else None
    spread = calibrated_spread(calibration) if calibration else validated_spread(shape)
    fits = max_batch(scenario, Mechanism("none"), 0, scenario.load.mean_context)
    batches = _batches(scenario, fits)
    pairs = [(m, a) for m, a in mechanisms_of(request) if a is not None]
    contexts, edges = _contexts(scenario, [a for _, a in pairs])
    work = _Work(request, scenario, spread, [])
    for mechanism, acceptance in [(Mechanism("none"), None), *pairs]:
        longest = 0 if mechanism.kind == "none" else request.longest
        made = candidate(scenario, mechanism, acceptance, batches, longest, contexts, calibration)
        if not made.fits[:, :, 0].any():
            work.warnings.append(f"{mechanism.label}: does not fit beside the target and is left out.")
            continue
        work.candidates.append(made)
    return Plan(_data(work, edges, calibration))


def scenario_of(request: PlanRequest) -> Scenario:
    """Model, devices and load of a request, priced by its calibration or the prior."""
    shape, hardware = find_model(request.model), find_hardware(request.hardware)
    prior = prior_constants(hardware.family, request.engine)
    if request.calibration:
        prior = Calibration.of(request.calibration).constants(hardware.family, request.engine)
    return Scenario(
        shape=shape, hardware=hardware,
        load=Load(request.context_tokens, request.output_tokens, request.concurrency),
        precision=Precision.of(shape, request.dtype, request.kv_dtype),
        layout=Layout(request.tensor, request.expert), devices=request.devices, constants=prior,
        utilisation=request.utilisation,
    )  # fmt: skip


def mechanisms_of(
    request: PlanRequest, needs_acceptance: bool = True
) -> list[tuple[Mechanism, Acceptance | None]]:
    """The mechanisms of a request with their acceptance."""
    found: list[tuple[Mechanism, Acceptance | None]] = []
    for text, given in request.drafts:
        mechanism = parse_draft(text, request.draft_dtype)
        if mechanism.kind == "none":
            continue
        if given is None and needs_acceptance:
            raise InvalidParameter(
                "acceptance",
                None,
                "one for each --draft",
                f"{text} has none. Measure it (`paceline probe`, or a trace of a run), take a published "
                "curve "
                "(`paceline plan --list`), or assume one, for example --acceptance AL:2.5@3.",
            )
        found.append((mechanism, None if given is None else read_acceptance(given, request.survival)))
    return found


def _batches(scenario: Scenario, fits: int) -> list[int]:
    top = (
        fits
        if scenario.load.concurrency is None
        else math.ceil(scenario.load.concurrency / scenario.replicas)
    )
    top = max(1, min(top, fits, 512 if scenario.load.concurrency is None else 8192))
    if top <= 512:
        return list(range(1, top + 1))
    return sorted({*range(1, 257), *(int(x) for x in np.geomspace(257, top, 256))})


def _contexts(
    scenario: Scenario, profiles: Sequence[Acceptance | None]
) -> tuple[list[float], list[float | None]]:
    """The load's own context first, then one context for each band of the schedule."""
    mean = scenario.load.mean_context
    bounds = {upto for a in profiles if a for upto, _ in a.by_context if math.isfinite(upto)}
    edges = sorted(bounds | {e for e in _CONTEXT_EDGES if e < 8 * max(mean, 512)})
    inside = [(low * high) ** 0.5 for low, high in zip([max(edges[0] / 4, 1.0), *edges], edges, strict=False)]
    return [mean, *inside, max(edges[-1] * 2, mean)], [None, *edges, None]


def _data(work: _Work, edges: list[float | None], calibration: Calibration | None) -> dict[str, Any]:
    scenario, spread = work.scenario, work.spread
    answer = _answer(work)
    chosen = next(
        (c for c in work.candidates if c.mechanism.label == answer.best.mechanism), work.candidates[0]
    )
    drafting = chosen if chosen.mechanism.kind != "none" else _best_drafting(work)
    schedule = [] if drafting is None else schedule_section(drafting, edges, spread)
    work.warnings.extend(plan_notes(work.candidates, scenario, answer, drafting))
    if calibration is not None and calibration.cliff is not None:
        work.warnings.append(
            f"the timings show a cliff from batch {calibration.cliff[0]:g} on: rounds with drafts take "
            f"{calibration.cliff[1]:.1f} times what this plan says there; keep speculation off from "
            "that batch, "
            "or remove the cliff and calibrate again."
        )
    worst = max((e["regret"] for band in schedule for e in band["entries"]), default=0.0)
    if worst > 0.02:
        work.warnings.append(
            f"the schedule never lengthens drafts as the batch grows, which costs up to {worst:.1%} here: "
            "with experts, drafts pay best at middle batches, where all experts are read anyway."
        )
    return {
        "schema": SCHEMA,
        "request": dataclasses.asdict(work.request),
        "scenario": scenario_section(scenario),
        "candidates": [candidate_section(c) for c in work.candidates],
        "schedule": {"mechanism": drafting.mechanism.label if drafting else "none", "bands": schedule},
        "break_even": {
            c.mechanism.label: None if (e := break_even(c, spread)) is None else as_json(e)
            for c in work.candidates if c.mechanism.kind != "none"
        },
        "answer": answer_section(answer),
        "frontier": [point_section(p) for p in thin(envelope(work.candidates, spread))],
        "time_by_operator": operator_section(chosen, answer),
        "memory": memory_section(chosen, answer),
        "guidelines": _guidelines(work, drafting, answer),
        "pictures": pictures(work.candidates, scenario, spread),
        "warnings": work.warnings,
        "calibration": None if calibration is None else calibration.as_json(),
    }  # fmt: skip


def _answer(work: _Work) -> Answer:
    r = work.request
    answer = service_level(work.candidates, work.spread, r.min_tokens_per_user, r.max_ttft, r.concurrency)
    if answer.best.mechanism == "none":
        return answer
    try:
        plain = service_level(
            work.candidates[:1], work.spread, r.min_tokens_per_user, r.max_ttft, r.concurrency
        )
    except Infeasible:
        return answer
    if answer.best.device.value < MIN_GAIN * plain.best.device.value:
        work.warnings.append(
            f"{answer.best.mechanism} gains "
            f"{answer.best.device.value / plain.best.device.value - 1:.1%} at most, less "
            f"than the {MIN_GAIN - 1:.0%} it takes to tell it from nothing: off is advised."
        )
        return Answer(plain.best, answer.best, answer.limit)
    return answer


def _best_drafting(work: _Work) -> Candidate | None:
    drafting = [c for c in work.candidates if c.mechanism.kind != "none"]
    return max(
        drafting, key=lambda c: float(np.log(c.grid.speedup[:, :, 0].max(axis=1)).mean()), default=None
    )


def _guidelines(work: _Work, drafting: Candidate | None, answer: Answer) -> list[dict[str, Any]]:
    s, batch = work.scenario, answer.best.batch
    best_at = answer.best.draft_length
    longest = drafting.grid.lengths[-1] if drafting is not None else work.request.longest
    if drafting is not None:
        row = int(np.argmin(np.abs(drafting.grid.batches - batch)))
        best_at = int(drafting.grid.lengths[int(np.argmax(drafting.grid.speedup[row, :, 0]))])
    found = [
        guidelines.fill_the_products(s, batch, best_at),
        guidelines.start_length(s, batch, best_at),
        guidelines.attention_tiles(s, int(max(longest, 31)), best_at),
    ]
    if drafting is not None:
        found.append(guidelines.low_latency(drafting, work.spread))
        found.append(guidelines.weigh_mechanisms([c for c in work.candidates if c.acceptance], work.spread))
    return [
        {"number": g.number, "title": g.title, "verdict": g.verdict, "disagreement": g.disagreement,
         "values": {k: as_json(v) for k, v in g.values.items()}}
        for g in found
    ]  # fmt: skip
