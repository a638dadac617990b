"""How many experts of a mixture-of-experts layer a set of tokens touches.

Coupon collector under top-k routing: E(1 - (1 - k/E)^T) distinct experts for T independent tokens (MoESD,
arXiv 2505.19645, equation of N(t)); with uneven popularity the sum over experts of 1 - (1 - p_i)^T. Tokens
of one request route alike, so its 1 + D tokens count for fewer (Cohere, 2026: four tokens load about 2.5
times one, not 4).
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter

__all__ = ["active_experts", "effective_tokens"]

Array = npt.NDArray[np.float64]


def effective_tokens(batch: npt.ArrayLike, width: npt.ArrayLike, correlation: float) -> Array:
    """Independent tokens that `width` tokens of each of `batch` requests are worth: B(1 + (q-1)(1-rho))."""
    if not 0 <= correlation <= 1:
        raise InvalidParameter("routing correlation", correlation, "a number from 0 to 1")
    b, q = np.asarray(batch, dtype=np.float64), np.asarray(width, dtype=np.float64)
    return np.asarray(b * (1 + (q - 1) * (1 - correlation)))


def active_experts(experts: int, active: int, tokens: npt.ArrayLike, skew: float = 0.0) -> Array:
    """Expected distinct experts for `tokens` independent tokens, in [min(active, ...), experts]."""
    t = np.asarray(tokens, dtype=np.float64)
    if skew == 0.0:
        return np.asarray(-experts * np.expm1(t * np.log1p(-min(active / experts, 1 - 1e-15))))
    grid, values = _skewed(experts, active, skew)
    return np.asarray(np.interp(np.log(np.maximum(t, 1e-9)), grid, values))


@functools.cache
def _skewed(experts: int, active: int, skew: float) -> tuple[Array, Array]:
    """Sum over experts of 1 - (1 - p_i)^T with p_i ~ rank^-skew, on a logarithmic grid of T."""
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    p = weights / weights.sum() * active
    for _ in range(64):  # no expert is chosen more than once a token: push the excess down the ranks
        excess = p > 1
        if not excess.any():
            break
        spare = p[excess].sum() - excess.sum()
        p[excess] = 1.0
        free = p < 1
        p[free] *= 1 + spare / p[free].sum()
    log_t = np.linspace(0.0, np.log(1e6), 400)
    with np.errstate(divide="ignore"):
        log_miss = np.log1p(-np.minimum(p, 1.0))
    values = np.array([-np.expm1(t * log_miss).sum() for t in np.exp(log_t)])
    return log_t, values
