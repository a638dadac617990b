"""How far to draft in one round: the length with the most expected tokens per unit of cost.

With `survival[i]` the chance that draft i is accepted, a round of draft length D emits AL(D) = 1 + Σ
survival[:D] tokens and costs cost(D). D + 1 beats D where survival[D] / AL(D) > (cost(D+1) - cost(D)) /
cost(D); but a real cost is a staircase (tiles, captured graph sizes) and not convex, so stopping at the first
step that does not pay can stop too early: every length is compared.

Under `coupled` and greedy verification the length of a draft may depend on anything without biasing the
output. Under `rejection` and `block` it may not depend on the drafted tokens beyond what those rules allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

__all__ = ["choose_length", "expected_tokens", "survival_of"]


def choose_length(
    survival: Sequence[float],  # [budget]; survival[i] = P(drafts 0..i are all accepted)
    cost: Callable[[int], float],  # draft length -> cost of the round, any unit; > 0
    min_gain: float = 0.0,  # a draft is worth it only where the rate beats plain decoding by this share
) -> int:
    """The length D in [0, len(survival)] with the largest (1 + Σ survival[:D]) / cost(D), the shortest.

    0, plain decoding, where no length emits more than (1 + min_gain) times its tokens per cost.
    """
    plain = 1.0 / _positive(cost, 0)
    best_length, best_rate = 0, plain
    tokens = 1.0
    for length, chance in enumerate(survival, start=1):
        tokens += chance
        rate = tokens / _positive(cost, length)
        if rate > best_rate and rate > plain * (1.0 + min_gain):
            best_length, best_rate = length, rate
    return best_length


def expected_tokens(survival: Sequence[float], length: int) -> float:
    """AL(length) = 1 + Σ survival[:length], the target's own token included."""
    return 1.0 + sum(survival[:length])


def survival_of(acceptance: Sequence[float]) -> list[float]:
    """Running products of the conditional acceptance by position."""
    return list(accumulate(acceptance, mul))


def _positive(cost: Callable[[int], float], length: int) -> float:
    value = cost(length)
    assert value > 0.0, f"the cost of a round with draft length {length} is {value}; it must be positive"
    return value
