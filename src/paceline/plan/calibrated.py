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
    region = _region(scenario, mechanism, rows)
    if region is not None:
        rows = [t for t in rows if t.batch < region[0]]
    fit, predictor, rows, cliffs = _without_cliffs(scenario, mechanism, rows)
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
        region,
    )
    return Calibrated(made, fit, predictor, tuple(_ordered(rows)), scenario, tuple(cliffs))


def _without_cliffs(
    scenario: Scenario, mechanism: Mechanism, rows: list[Timing]
) -> tuple[Fit, Predictor, list[Timing], list[Timing]]:
    """Drops the row that is slowest against the fit, while it is over 25 % too slow and four rows are
    left.
    """
    fit, predictor = _fit(scenario, mechanism, rows)
    dropped: list[Timing] = []
    kept = rows
    while len(kept) > 4:
        # Residuals are log predicted minus log measured rates: above log 1.25 the row was that much slower.
        worst = int(np.argmax(fit.residuals))
        if fit.residuals[worst] <= np.log(1.25):
            return fit, predictor, kept, dropped
        dropped.append(_ordered(kept)[worst])
        kept = [t for t in kept if t is not dropped[-1]]
        fit, predictor = _fit(scenario, mechanism, kept)
    if float(fit.residuals.max()) <= np.log(1.25):
        return fit, predictor, kept, dropped
    fit, predictor = _fit(scenario, mechanism, rows)  # no smooth machine in these rows: keep them all
    return fit, predictor, rows, []


def _region(scenario: Scenario, mechanism: Mechanism, rows: list[Timing]) -> tuple[float, float] | None:
    """The steepest cliff: (batch from which drafting is over 25 % slower than below, by how much)."""
    steepest: tuple[float, float] | None = None
    for start in sorted({t.batch for t in rows if t.draft_length})[1:]:
        below = [t for t in rows if t.batch < start]
        if len(below) < 4 or not any(t.draft_length for t in below):
            continue
        fit, predictor = _fit(scenario, mechanism, below)
        if float(np.abs(fit.residuals).max()) > np.log(1.25):
            continue
        slow = np.array(_misses(scenario, mechanism, fit, predictor, rows, start))
        jump = float(np.exp(np.median(slow)))
        if (slow > np.log(1.25)).mean() >= 0.7 and (steepest is None or jump > steepest[1]):
            steepest = (start, jump)
    return steepest


def _misses(
    scenario: Scenario,
    mechanism: Mechanism,
    fit: Fit,
    predictor: Predictor,
    rows: list[Timing],
    batch: float,
) -> list[float]:
    """Log measured over predicted time of the drafted rows of one batch."""
    here = [t for t in rows if t.batch == batch and t.draft_length]
    ledgers, groups = _ledgers(scenario, mechanism, here)
    predicted = predictor.log_rates(fit.mode, ledgers, groups)
    rates = [1 / t.round_s if t.round_s else (t.tokens_per_s or 0.0) for g in groups for t in g]
    return [float(p - np.log(r)) for p, r in zip(predicted, rates, strict=True)]


def _groups(rows: Sequence[Timing]) -> list[list[Timing]]:
    found: dict[float | None, list[Timing]] = defaultdict(list)
    for t in rows:
        found[t.context].append(t)
    return list(found.values())


def _ordered(rows: Sequence[Timing]) -> list[Timing]:
    return [t for group in _groups(rows) for t in group]


def _fit(scenario: Scenario, mechanism: Mechanism, rows: Sequence[Timing]) -> tuple[Fit, Predictor]:
    ledgers, groups = _ledgers(scenario, mechanism, rows)
    return calibrate(ledgers, groups, scenario.priced_by)


def _ledgers(
    scenario: Scenario, mechanism: Mechanism, rows: Sequence[Timing]
) -> tuple[list[Ledger], list[list[Timing]]]:
    groups = _groups(rows)
    ledgers = [
        Ledger.of(scenario, mechanism, [t.batch for t in g], [t.draft_length for t in g],
                  [scenario.load.mean_context if t.context is None else t.context for t in g])
        for g in groups
    ]  # fmt: skip
    return ledgers, groups


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
