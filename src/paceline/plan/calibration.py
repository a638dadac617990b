"""Fits the cost model's constants to a few timings, and says how sure it is afterwards.

Unknowns are logarithms of the constants (priors: `constants.PRIOR_SD`), and, where timings carry no
acceptance length, the acceptance curve AL(D) = 1 + sum s r^(i-1). Residuals are logarithmic. The fit is the
posterior mode by Levenberg-Marquardt, its spread the Laplace covariance, scaled by the residuals it leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.estimate import Origin
from paceline.errors import InvalidParameter
from paceline.plan.constants import PRIOR_SD, Constants, prior_constants
from paceline.plan.residuals import Spread
from paceline.plan.timings import Ledger, Timing

__all__ = [
    "FITTED",
    "Calibration",
    "Fit",
    "Predictor",
    "calibrate",
    "calibrated_spread",
    "fit_logs",
    "predictive_sd",
]

Array = npt.NDArray[np.float64]
NOISE = 0.04  # prior log standard deviation of one timing around the model, over batches and contexts
NOISE_AT_ONE_POINT = 0.02  # the same where all timings share batch and context: only the round's parts differ
_NOISE_WEIGHT = 4.0  # as many timings' worth of belief in it
Z80 = 1.2816


@dataclass(frozen=True, slots=True)
class Fit:
    """Posterior of log parameters: mode, covariance, noise of one timing, and the residuals at the mode."""

    names: tuple[str, ...]
    mode: Array
    covariance: Array
    noise: float
    residuals: Array

    def logs(self) -> dict[str, float]:
        return {n: float(v) for n, v in zip(self.names, self.mode, strict=True)}


def fit_logs(
    predict: Callable[[Array], Array],  # log parameters [n] -> log predictions [rows]
    observed: Array,  # log observations [rows]
    names: Sequence[str],
    prior_sd: Array,
    prior_mean: Array | None = None,
    noise: float = NOISE,
    steps: int = 40,
) -> Fit:
    """Posterior mode and Laplace covariance of a model with log-normal priors and log-normal noise."""
    mean = np.zeros(len(names)) if prior_mean is None else prior_mean
    x, damping = mean.copy(), 1e-2

    def stacked(at: Array) -> Array:
        return np.concatenate([(predict(at) - observed) / noise, (at - mean) / prior_sd])

    value = stacked(x)
    for _ in range(steps):
        jacobian = _jacobian(stacked, x, value)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ value
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        tried = stacked(x + move)
        if tried @ tried < value @ value:
            x, gained, value, damping = x + move, value @ value - tried @ tried, tried, damping / 4
            if gained < 1e-6 * (1 + value @ value):
                break
        else:
            damping *= 6
            if damping > 1e8:
                break
    jacobian = _jacobian(stacked, x, value)
    residuals = predict(x) - observed
    # Each fitted constant spends some of the data; its prior pays for the rest.
    free = max(len(observed) - 0.7 * len(names), 1.0)
    spread = math.sqrt((_NOISE_WEIGHT * noise**2 + float(residuals @ residuals)) / (_NOISE_WEIGHT + free))
    data = jacobian[: len(observed)] * (noise / spread)
    prior = jacobian[len(observed) :]
    covariance = np.linalg.inv(data.T @ data + prior.T @ prior)
    return Fit(tuple(names), x, np.asarray(covariance, dtype=np.float64), spread, residuals)


def _jacobian(function: Callable[[Array], Array], at: Array, value: Array) -> Array:
    step = 1e-4
    columns = []
    for i in range(len(at)):
        moved = at.copy()
        moved[i] += step
        columns.append((function(moved) - value) / step)
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit of the cost constants, as it is kept in a plan."""

    logs: Mapping[str, float]
    covariance: Array
    noise: float
    rows: int
    median_error: float
    survival_fit: tuple[float, float] | None = None  # (s, r), where timings carried no acceptance length
    cliff: tuple[float, float] | None = None  # (batch from which it does not hold, times slower there)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Calibration:
        try:
            return cls(
                dict(data["logs"]), np.array(data["covariance"], dtype=float), float(data["noise"]),
                int(data["rows"]), float(data["median_error"]),
                tuple(data["survival_fit"]) if data.get("survival_fit") else None,
                tuple(data["cliff"]) if data.get("cliff") else None,
            )  # fmt: skip
        except KeyError as error:
            raise InvalidParameter("calibration", sorted(data), f"a field {error.args[0]}") from error

    def as_json(self) -> dict[str, Any]:
        return {
            "logs": dict(self.logs),
            "covariance": self.covariance.tolist(),
            "noise": self.noise,
            "rows": self.rows,
            "median_error": self.median_error,
            "survival_fit": list(self.survival_fit) if self.survival_fit else None,
            "cliff": list(self.cliff) if self.cliff else None,
        }

    def constants(self, family: str, engine: str = "any") -> Constants:
        known = {f.name for f in dataclasses.fields(Constants)}
        return prior_constants(family, engine).scaled({k: v for k, v in self.logs.items() if k in known})

    def surer(self) -> dict[str, tuple[float, float]]:
        """Constant -> (prior, posterior) log standard deviation."""
        after = np.sqrt(np.diag(self.covariance))
        return {n: (PRIOR_SD.get(n, 0.5), float(s)) for n, s in zip(self.logs, after, strict=True)}


def calibrated_spread(calibration: Calibration) -> Spread:
    """80 % factors of times and ratios after calibration, for figures without a derivative of their own.

    Noise of the timings around the model and what is left of the prior; an overhead's share of a step is
    small, so a quarter of the constants' mean spread counts. Rates have `bands.cost_sd` instead.
    """
    left = float(np.sqrt(np.diag(calibration.covariance)).mean()) / 4
    sd = Z80 * math.hypot(calibration.noise, left)
    return Spread(
        math.exp(-sd),
        math.exp(sd),
        math.exp(-2 * sd),
        math.exp(2 * sd),
        Origin.INTERPOLATED,
        f"calibrated on {calibration.rows} timings",
    )


# What timings of whole rounds can tell apart; the rest stays at its prior.
FITTED = ("weight_bandwidth", "expert_bandwidth", "kv_bandwidth", "compute", "starts", "row_s", "host_s",
          "round_s", "draft_step_s", "prefill")  # fmt: skip
# Prior of the acceptance curve where timings carry none: first acceptance and its decay, as logits.
_CURVE_MEAN = np.array([math.log(0.84 / 0.16), math.log(0.73 / 0.27)])
_CURVE_SD = np.array([0.5, 0.3])


def calibrate(
    ledgers: Sequence[Ledger],
    timings: Sequence[Sequence[Timing]],
    prior: Constants,
    fitted: Sequence[str] = FITTED,
) -> tuple[Fit, Predictor]:
    """Fits the constants to timings; ledger i holds the work of the rows of timings[i]."""
    if not any(timings):
        raise InvalidParameter(
            "timings",
            0,
            "at least one row; six are enough: batch 1 and about half the largest, "
            "each with draft length 0, 1 to 3, and 5 or more",
        )
    rows = [t for group in timings for t in group]
    unknown = any(t.draft_length > 0 and t.acceptance_length is None for t in rows)
    needed = any(t.tokens_per_s is not None for t in rows)
    predictor = Predictor(tuple(fitted), prior, unknown and needed)
    observed = np.log([1 / t.round_s if t.round_s else float(t.tokens_per_s or 0.0) for t in rows])
    fit = fit_logs(
        lambda x: predictor.log_rates(x, ledgers, timings),
        observed,
        predictor.names,
        predictor.prior_sd(),
        predictor.prior_mean(),
        NOISE if len({(t.batch, t.context) for t in rows}) > 1 else NOISE_AT_ONE_POINT,
    )
    return fit, predictor


@dataclass(frozen=True, slots=True)
class Predictor:
    """Log rates of rows as a function of log parameters: throughput, or rounds per second."""

    fitted: tuple[str, ...]
    prior: Constants
    curve: bool  # whether the acceptance curve is among the unknowns

    @property
    def names(self) -> tuple[str, ...]:
        return self.fitted + (("first acceptance", "decay of acceptance") if self.curve else ())

    def prior_sd(self) -> Array:
        own = np.array([PRIOR_SD[n] for n in self.fitted])
        return np.concatenate([own, _CURVE_SD]) if self.curve else own

    def prior_mean(self) -> Array:
        own = np.zeros(len(self.fitted))
        return np.concatenate([own, _CURVE_MEAN]) if self.curve else own

    def constants(self, x: Array) -> Constants:
        return self.prior.scaled(
            {n: float(v) for n, v in zip(self.fitted, x[: len(self.fitted)], strict=True)}
        )

    def tokens(self, x: Array, draft_length: Array, measured: Sequence[float | None]) -> Array:
        """Tokens a round: as measured, or from the fitted curve 1 + sum s r^(i-1)."""
        if self.curve:
            s, r = 1 / (1 + np.exp(-x[-2:]))
            fitted = 1 + s * (1 - r**draft_length) / (1 - r)
        else:
            fitted = np.ones_like(draft_length)
        return np.array([f if m is None else m for f, m in zip(fitted, measured, strict=True)])

    def log_rates(self, x: Array, ledgers: Sequence[Ledger], timings: Sequence[Sequence[Timing]]) -> Array:
        c = self.constants(x)
        found = []
        for ledger, group in zip(ledgers, timings, strict=True):
            tokens = self.tokens(x, ledger.draft_length, [t.acceptance_length for t in group])
            by_rate = np.array([t.tokens_per_s is not None for t in group])
            rounds = 1 / ledger.round_s(c) if not by_rate.all() else 1.0
            rates = ledger.tokens_per_s(c, tokens) if by_rate.any() else 1.0
            found.append(np.log(np.where(by_rate, rates, rounds)))
        return np.concatenate(found)


def predictive_sd(fit: Fit, predict: Callable[[Array], Array]) -> Array:
    """Log standard deviation of new measurements under the posterior: parameters and noise together."""
    value = predict(fit.mode)
    jacobian = _jacobian(predict, fit.mode, value)
    return np.asarray(np.sqrt(np.einsum("ij,jk,ik->i", jacobian, fit.covariance, jacobian) + fit.noise**2))
