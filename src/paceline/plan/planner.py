"""From a request to a plan: reads nothing but the tables and files it is given, decides, and writes down why."""

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
from paceline.plan.frontier import Answer, Candidate, Point, break_even, candidate, envelope, service_level
from paceline.plan.hardware import find_hardware
from paceline.plan.importers import read_acceptance
from paceline.plan.mechanisms import KINDS, Mechanism
from paceline.plan.memory import max_batch, memory_use
from paceline.plan.pictures import pictures
from paceline.plan.regret import verdict_of
from paceline.plan.residuals import Spread, validated_spread
from paceline.plan.rounds import target_cost
from paceline.plan.scenario import Load, Scenario
from paceline.plan.schedule import Band, make_schedule

__all__ = ["PlanRequest", "make_plan", "mechanisms_of", "parse_draft", "scenario_of"]

MIN_GAIN = 1.03  # below this, speculation is not worth running: the model cannot tell it from nothing
_CONTEXT_EDGES = (2048.0, 8192.0, 32768.0)
_GRAPH_ROWS = 512  # rows past which engines of today stop capturing graphs by default


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the command line asks, field by flag. `drafts` pairs a mechanism with its acceptance, as written."""

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
    """KIND or KIND:MODEL; a bare name or path means model:. For ngram and suffix, MODEL may be a share, 0.4."""
    kind, _, name = text.partition(":")
    if kind == "auto":
        raise InvalidParameter("draft", text, "a mechanism; `auto` chooses at run time, a plan compares the ones named")
    if kind in ("ngram", "suffix") and name:
        try:
            return Mechanism(kind, proposed_share=float(name))
        except ValueError:
            raise InvalidParameter("draft", text, f"{kind} or {kind}:SHARE, the share of rounds that propose") from None
    if kind == "model" or (kind not in KINDS and not name):
        target = name or text
        return Mechanism("model", model=find_model(target), name=target, dtype=dtype)
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
        made = candidate(scenario, mechanism, acceptance, batches, longest, contexts)
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
                "acceptance", None, "one for each --draft",
                f"{text} has none. Measure it (`paceline probe`, or a trace of a run), take a published curve "
                "(`paceline plan --list`), or assume one, for example --acceptance AL:2.5@3.",
            )  # fmt: skip
        found.append((mechanism, None if given is None else read_acceptance(given, request.survival)))
    return found


def _batches(scenario: Scenario, fits: int) -> list[int]:
    top = fits if scenario.load.concurrency is None else math.ceil(scenario.load.concurrency / scenario.replicas)
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
    return [mean, *inside, edges[-1] * 2], [None, *edges, None]


def _data(work: _Work, edges: list[float | None], calibration: Calibration | None) -> dict[str, Any]:
    scenario, spread = work.scenario, work.spread
    answer = _answer(work)
    chosen = next((c for c in work.candidates if c.mechanism.label == answer.best.mechanism), work.candidates[0])
    drafting = chosen if chosen.mechanism.kind != "none" else _best_drafting(work)
    schedule = [] if drafting is None else _schedule(drafting, edges, spread)
    _warn(work, answer, drafting)
    return {
        "schema": SCHEMA,
        "request": dataclasses.asdict(work.request),
        "scenario": _scenario_json(scenario),
        "candidates": [_candidate_json(c, spread) for c in work.candidates],
        "schedule": {"mechanism": drafting.mechanism.label if drafting else "none", "bands": schedule},
        "break_even": {
            c.mechanism.label: None if (e := break_even(c, spread)) is None else as_json(e)
            for c in work.candidates if c.mechanism.kind != "none"
        },
        "answer": _answer_json(answer),
        "frontier": [_point_json(p) for p in _thin(envelope(work.candidates, spread))],
        "time_by_operator": _operators(chosen, answer),
        "memory": _memory(chosen, answer),
        "guidelines": _guidelines(work, drafting, answer),
        "pictures": pictures(work.candidates, scenario),
        "warnings": work.warnings,
        "calibration": None if calibration is None else calibration.as_json(),
    }  # fmt: skip


def _answer(work: _Work) -> Answer:
    r = work.request
    answer = service_level(work.candidates, work.spread, r.min_tokens_per_user, r.max_ttft, r.concurrency)
    if answer.best.mechanism == "none":
        return answer
    try:
        plain = service_level(work.candidates[:1], work.spread, r.min_tokens_per_user, r.max_ttft, r.concurrency)
    except Infeasible:
        return answer
    if answer.best.device.value < MIN_GAIN * plain.best.device.value:
        work.warnings.append(
            f"{answer.best.mechanism} gains {answer.best.device.value / plain.best.device.value - 1:.1%} at most, less "
            f"than the {MIN_GAIN - 1:.0%} it takes to tell it from nothing: off is advised."
        )
        return Answer(plain.best, answer.best, answer.limit)
    return answer


def _best_drafting(work: _Work) -> Candidate | None:
    drafting = [c for c in work.candidates if c.mechanism.kind != "none"]
    return max(drafting, key=lambda c: float(np.log(c.grid.speedup[:, :, 0].max(axis=1)).mean()), default=None)


def _schedule(c: Candidate, edges: list[float | None], spread: Spread) -> list[dict[str, Any]]:
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
    return {**dataclasses.asdict(e), "expected_regret": expected, "chance_best": chance, "gain": gain}


def _warn(work: _Work, answer: Answer, drafting: Candidate | None) -> None:
    best, scenario = answer.best, work.scenario
    row = work.candidates[0].grid
    i = int(np.argmin(np.abs(row.batches - best.batch)))
    delay = float(row.batches[i] * row.prefill_s[i, 0, 0])
    share = delay / (float(row.plain_s[i, 0, 0]) + delay)
    if share > 0.5:
        work.warnings.append(
            f"prefill is the limit: {share:.0%} of the time at batch {best.batch} goes into reading prompts, which "
            "speculation does not speed up; chunked prefill, prefix caching or a prefill pool help more."
        )
    if best.batch * (1 + best.draft_length) > _GRAPH_ROWS:
        work.warnings.append(
            f"{best.batch * (1 + best.draft_length)} rows a round lie past the {_GRAPH_ROWS} that engines capture "
            "as graphs by default; past them a step can cost several times more (measured: 20.6 to 104 ms). Raise "
            "the engine's capture size or measure."
        )
    for c in work.candidates:
        a = c.acceptance
        if a is None:
            continue
        known = len(a.at(scenario.load.mean_context))
        used = int(c.grid.lengths[-1])
        if used > known and c is drafting:
            work.warnings.append(f"{c.mechanism.label}: acceptance is known to D = {known}; beyond it the last is held.")
        if a.temperature == 0.0:
            work.warnings.append(
                f"{c.mechanism.label}: acceptance measured at temperature 0; sampled traffic is accepted less often."
            )
        work.warnings.extend(_by_part(c))
    if scenario.hardware.flops_per_s.get("int8", 1e15) < 2e14 and scenario.precision.linear == "int8":
        work.warnings.append(f"{scenario.hardware.title} multiplies int8 slowly; use fp8 or fp4 there.")


def _by_part(c: Candidate) -> list[str]:
    """Kinds of traffic for which drafting does not pay, where the acceptance is a mixture."""
    assert c.acceptance is not None
    found = []
    row = len(c.grid.batches) // 2
    for share, part in c.acceptance.parts:
        lengths = part.lengths(int(c.grid.lengths[-1]), float(c.grid.contexts[0]))
        gain = float((lengths[c.grid.lengths.astype(int)] / c.grid.cost_ratio[row, :, 0]).max())
        if gain < MIN_GAIN:
            found.append(
                f"{c.mechanism.label}: {part.source} ({share:.0%} of tokens) gains nothing at batch "
                f"{int(c.grid.batches[row])}: run it without speculation."
            )
    return found


def _scenario_json(s: Scenario) -> dict[str, Any]:
    return {
        "model": s.shape.name, "parameters": s.shape.parameters, "active_parameters": s.shape.active_parameters,
        "model_source": s.shape.source, "hardware": s.hardware.title, "hardware_source": s.hardware.source,
        "devices": s.devices, "replicas": s.replicas, "tp": s.layout.tensor, "ep": s.layout.expert,
        "linear": s.precision.linear, "experts": s.precision.experts, "kv": s.precision.kv,
        "context_tokens": s.load.prompt_tokens, "output_tokens": s.load.output_tokens,
        "constants": {k: v for k, v in dataclasses.asdict(s.priced_by).items()},
    }  # fmt: skip


def _candidate_json(c: Candidate, spread: Spread) -> dict[str, Any]:
    rows = sorted({0, *(int(np.argmin(np.abs(c.grid.batches - b))) for b in (8, 32, 128, c.grid.batches[-1]))})
    longest = int(c.grid.lengths[-1])
    table = []
    for i in rows:
        best = int(np.argmax(c.grid.speedup[i, :, 0]))
        table.append({
            "batch": int(c.grid.batches[i]), "best_length": int(c.grid.lengths[best]),
            "speedup": float(c.grid.speedup[i, best, 0]), "cost_ratio": float(c.grid.cost_ratio[i, best, 0]),
            "round_ms": float(c.grid.round_s[i, best, 0] * 1e3), "plain_ms": float(c.grid.plain_s[i, 0, 0] * 1e3),
            "idle_ms": float(c.grid.idle_s[i, 0, 0] * 1e3), "draft_ms": float(c.grid.draft_s[i, best, 0] * 1e3),
        })  # fmt: skip
    a = c.acceptance
    return {
        "mechanism": c.mechanism.label, "kind": c.mechanism.kind, "name": c.mechanism.name,
        "proposed_share": c.mechanism.proposed_share, "longest": longest,
        "acceptance": None if a is None else {
            "conditional": [float(x) for x in a.at(float(c.grid.contexts[0]))],
            "length": [as_json(a.estimate(d, float(c.grid.contexts[0]))) for d in range(1, longest + 1)],
            "source": a.source, "temperature": a.temperature,
        },
        "by_batch": table,
        "fits": {"batch_at_longest": int(c.limits[-1, 0]), "batch_without_drafts": int(c.limits[0, 0])},
        "time_factors": [spread.time_low, spread.time_high],
    }  # fmt: skip


def _point_json(p: Point) -> dict[str, Any]:
    return {
        "mechanism": p.mechanism, "batch": p.batch, "draft_length": p.draft_length, "user": as_json(p.user),
        "device": as_json(p.device), "first_token": as_json(p.first_token),
        "acceptance_length": p.acceptance_length, "round_ms": p.round_ms,
    }  # fmt: skip


def _answer_json(a: Answer) -> dict[str, Any]:
    return {
        "best": _point_json(a.best), "runner_up": None if a.runner_up is None else _point_json(a.runner_up),
        "limit": a.limit,
    }  # fmt: skip


def _thin(points: list[Point], most: int = 80) -> list[Point]:
    if len(points) <= most:
        return points
    picked = sorted({round(i * (len(points) - 1) / (most - 1)) for i in range(most)})
    return [points[i] for i in picked]


def _operators(c: Candidate, answer: Answer) -> list[dict[str, Any]]:
    best, s = answer.best, c.scenario
    width = c.mechanism.widths(float(best.draft_length))
    parts = target_cost(s, float(best.batch), width, s.load.mean_context).by_operator_s
    found = [{"operator": k, "ms": float(np.asarray(v).ravel()[0]) * 1e3} for k, v in parts.items()]
    i = int(np.argmin(np.abs(c.grid.batches - best.batch)))
    if best.draft_length:
        d = int(np.flatnonzero(c.grid.lengths == best.draft_length)[0])
        found.append({"operator": "drafting", "ms": float(c.grid.draft_s[i, d, 0] * 1e3)})
        found.append({"operator": "speculative round", "ms": s.priced_by.round_s * 1e3})
    return sorted(found, key=lambda row: -float(str(row["ms"])))


def _memory(c: Candidate, answer: Answer) -> dict[str, Any]:
    use = memory_use(c.scenario, c.mechanism, answer.best.draft_length, c.scenario.load.mean_context)
    return {k: getattr(use, k) for k in type(use).__slots__} | {
        "sequences_that_fit": max_batch(
            c.scenario, c.mechanism, answer.best.draft_length, c.scenario.load.mean_context
        )
    }


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


