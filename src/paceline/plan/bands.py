"""How wide the range of every point of a grid is: what is unsure of the cost, and of the acceptance.

Costs, calibrated: the posterior of the constants, by the derivative of the log rate at each point, and the
noise of a timing. Uncalibrated: the validated residuals (`residuals.py`), one factor everywhere. Acceptance:
the spread of the resampled or assumed curves. Both are independent and add in the square.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.plan.acceptance import Acceptance
from paceline.plan.calibration import Calibration
from paceline.plan.mechanisms import Mechanism
from paceline.plan.rounds import Grid, evaluate
from paceline.plan.scenario import Scenario, with_constants

__all__ = ["acceptance_sd", "cost_sd"]

Array = npt.NDArray[np.float64]
_STEP = 0.02


def cost_sd(
    scenario: Scenario,
    mechanism: Mechanism,
    acceptance: Acceptance | None,
    grid: Grid,
    calibration: Calibration,
) -> Array:
    """[batch, length, context] log standard deviation of the rates under a calibration."""
    base = np.log(grid.user_tokens_per_s)
    slopes = []
    for name in calibration.logs:
        moved = with_constants(scenario, scenario.priced_by.scaled({name: _STEP}))
        other = evaluate(moved, mechanism, acceptance, grid.batches, grid.lengths, grid.contexts)
        slopes.append((np.log(other.user_tokens_per_s) - base) / _STEP)
    jacobian = np.stack(slopes)
    variance = np.einsum("i...,ij,j...->...", jacobian, calibration.covariance, jacobian)
    return np.asarray(np.sqrt(variance + calibration.noise**2))


def acceptance_sd(mechanism: Mechanism, acceptance: Acceptance | None, grid: Grid, seed: int = 0) -> Array:
    """[length, context] log standard deviation of the tokens of a round."""
    found = np.zeros((grid.lengths.size, grid.contexts.size))
    if acceptance is None:
        return found
    for k, context in enumerate(grid.contexts):
        curves = acceptance.length_draws(int(grid.lengths[-1]), 100, seed, float(context))
        tokens = mechanism.tokens(curves[:, grid.lengths.astype(int)], acceptance.all_rounds)
        found[:, k] = np.log(tokens).std(axis=0)
    return found
