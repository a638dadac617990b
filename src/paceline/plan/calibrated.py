"""Calibration of a plan's request: scenario and drafter from the request, constants from timings."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import InvalidParameter
from paceline.plan.calibration import Calibration, Fit, Predictor, calibrate
from paceline.plan.mechanisms import Mechanism
from paceline.plan.planner import PlanRequest, mechanisms_of, scenario_of
from paceline.plan.scenario import Scenario
from paceline.plan.suggest import Suggestion, first_design, suggest
from paceline.plan.timings import Ledger, Timing

__all__ = ["Calibrated", "calibrate_request", "suggest_first", "suggest_next"]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The fit, as a plan keeps it, and the rows it was made of with their residuals (log predicted /
    measured).
    """

    calibration: Calibration
    fit: Fit
    predictor: Predictor
    timings: tuple[Timing, ...]
    scenario: Scenario
    cliffs: tuple[Timing, ...]


def _drafter(request: PlanRequest) -> Mechanism:
    found = mechanisms_of(request, needs_acceptance=False)
    return found[0][0] if found else Mechanism("none")


def calibrate_request(request: PlanRequest, timings: Sequence[Timing]) -> Calibrated:
    """Fits the constants. Rows far above the fit in one region are left out of it and named as a cliff."""
    scenario, mechanism = scenario_of(dataclasses.replace(request, calibration=None)), _drafter(request)
    if mechanism.kind == "none" and any(t.draft_length for t in timings):
        raise InvalidParameter(
            "draft", None, "the mechanism the timings drafted with", "Write --draft KIND[:MODEL]."
        )
    rows = list(timings)
    fit, predictor = _fit(scenario, mechanism, rows)
    # Residuals are log predicted minus log measured rates: above log 1.25 the row was that much slower.
    cliffs = [t for t, r in zip(_ordered(rows), fit.residuals, strict=True) if r > 0.22]
    if cliffs and len(rows) - len(cliffs) >= 4:
        rows = [t for t in rows if t not in cliffs]
        fit, predictor = _fit(scenario, mechanism, rows)
    else:
        cliffs = []
    constants = {n: v for n, v in fit.logs().items() if n in predictor.fitted}
    keep = [i for i, n in enumerate(fit.names) if n in constants]
    curve = tuple(1 / (1 + np.exp(-fit.mode[-2:]))) if predictor.curve else None
    made = Calibration(
        constants,
        fit.covariance[np.ix_(keep, keep)],
        fit.noise,
        len(rows),
        float(np.median(np.abs(fit.residuals))),
        None if curve is None else (float(curve[0]), float(curve[1])),
    )
    return Calibrated(made, fit, predictor, tuple(_ordered(rows)), scenario, tuple(cliffs))


def _groups(rows: Sequence[Timing]) -> list[list[Timing]]:
    found: dict[float | None, list[Timing]] = defaultdict(list)
    for t in rows:
        found[t.context].append(t)
    return list(found.values())


def _ordered(rows: Sequence[Timing]) -> list[Timing]:
    return [t for group in _groups(rows) for t in group]


def _fit(scenario: Scenario, mechanism: Mechanism, rows: Sequence[Timing]) -> tuple[Fit, Predictor]:
    groups = _groups(rows)
    ledgers = [
        Ledger.of(scenario, mechanism, [t.batch for t in g], [t.draft_length for t in g],
                  [scenario.load.mean_context if t.context is None else t.context for t in g])
        for g in groups
    ]  # fmt: skip
    return calibrate(ledgers, groups, scenario.priced_by)


def suggest_first(request: PlanRequest) -> list[tuple[int, int]]:
    """Six points for a machine nothing is known of."""
    from paceline.plan.memory import max_batch

    scenario = scenario_of(dataclasses.replace(request, calibration=None))
    fits = max_batch(scenario, Mechanism("none"), 0, scenario.load.mean_context)
    return first_design(min(request.concurrency or 256, fits), request.longest)


def suggest_next(request: PlanRequest, made: Calibrated) -> Suggestion:
    """The point whose measurement takes away most expected regret."""
    found = mechanisms_of(request, needs_acceptance=False)
    mechanism, acceptance = found[0] if found else (Mechanism("none"), None)
    lengths = np.arange(request.longest + 1, dtype=np.float64)
    if acceptance is not None:
        al = acceptance.lengths(request.longest, made.scenario.load.mean_context)
    elif made.calibration.survival_fit is not None:
        s, r = made.calibration.survival_fit
        al = np.asarray(1 + s * (1 - r**lengths) / (1 - r))
    else:
        raise InvalidParameter(
            "acceptance", None, "a profile, so that regret can be told", "Give --acceptance."
        )
    largest = request.concurrency or 256
    batches = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, largest} & set(range(1, largest + 1)))
    return suggest(made.scenario, mechanism, made.fit, made.predictor, lengths, np.asarray(al), batches)
