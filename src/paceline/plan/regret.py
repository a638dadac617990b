"""What a recommendation may cost: expected regret and the chance to be best, under the spread of costs and
acceptance.

Costs: R(D) - 1 = (R(1) - 1) + (R(D) - R(1)); the two parts (what a round costs at all, what each further
draft costs) are off by independent factors of the validated ratio spread. Acceptance: resampled curves.
Seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.plan.frontier import Candidate
from paceline.plan.residuals import Spread

__all__ = ["speed_draws", "verdict_of"]

Array = npt.NDArray[np.float64]
_Z80 = 1.2816


def _factors(spread: Spread, count: int, rng: np.random.Generator) -> Array:
    low, high = np.log(spread.ratio_low), np.log(spread.ratio_high)
    z = rng.normal(size=(count, 2)) / _Z80
    return np.asarray(np.exp(np.where(z < 0, -low * z, high * z)))


def speed_draws(
    c: Candidate, row: int, context: int, spread: Spread, count: int = 400, seed: int = 0
) -> Array:
    """[count, lengths] plausible speeds relative to the plain engine at one batch."""
    rng = np.random.default_rng(seed)
    g = c.grid
    ratio = g.cost_ratio[row, :, context]
    u = _factors(spread, count, rng)
    first = (ratio[1] - 1 if len(ratio) > 1 else 0.0) * (g.lengths > 0)
    more = ratio - 1 - first
    cost = 1 + u[:, :1] * first + u[:, 1:] * more
    if c.acceptance is None:
        tokens = np.ones((count, len(g.lengths)))
    else:
        curves = c.acceptance.length_draws(int(g.lengths[-1]), count, seed, float(g.contexts[context]))
        tokens = c.mechanism.tokens(curves[:, g.lengths.astype(int)], c.acceptance.all_rounds)
    plain = g.plain_s[row, 0, context]
    delay = g.batches[row] * g.prefill_s[row, :, 0]
    speed = tokens / (cost * plain + tokens * delay)
    return np.asarray(speed / speed[:, :1])


def verdict_of(c: Candidate, row: int, context: int, length: int, spread: Spread) -> tuple[float, float]:
    """(expected regret of `length`, chance that it is the best) at one batch."""
    draws = speed_draws(c, row, context, spread)
    at = int(np.flatnonzero(c.grid.lengths == length)[0])
    best = draws.max(axis=1)
    return float(np.mean(1 - draws[:, at] / best)), float(np.mean(draws[:, at] >= best - 1e-12))
