"""The Pareto frontier of tokens/s per user against tokens/s per device, break-even, and the service-level
question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.estimate import Estimate, Origin
from paceline.errors import Infeasible
from paceline.plan.acceptance import Acceptance
from paceline.plan.bands import acceptance_sd, cost_sd
from paceline.plan.calibration import Calibration
from paceline.plan.mechanisms import Mechanism
from paceline.plan.memory import max_batches
from paceline.plan.residuals import Spread
from paceline.plan.rounds import Grid, evaluate, first_token_seconds
from paceline.plan.scenario import Scenario

__all__ = ["Answer", "Candidate", "Point", "break_even", "candidate", "envelope", "service_level"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mechanism with its grid and the batches that fit in memory.

    limits   [length, context] sequences of one replica that fit
    """

    mechanism: Mechanism
    acceptance: Acceptance | None
    scenario: Scenario
    grid: Grid
    limits: Array
    first_token_s: Array  # [batch, length, context] mean seconds to the first token
    tokens_sd: Array  # [length, context] log standard deviation of the tokens of a round
    cost_sd: (
        Array | None
    )  # [batch, length, context] of the rates under a calibration; None: validated residuals

    def spread_at(self, i: int, d: int, k: int, spread: Spread) -> Spread:
        """The spread of rates at one point of the grid."""
        cost = None if self.cost_sd is None else float(self.cost_sd[i, d, k])
        return spread.at(float(self.tokens_sd[d, k]), cost)

    @property
    def fits(self) -> Array:
        """[batch, length, context] whether memory holds it."""
        return np.asarray(self.grid.batches[:, None, None] <= self.limits[None, :, :])


@dataclass(frozen=True, slots=True)
class Point:
    """One operating point of one replica; rates are estimates."""

    mechanism: str
    batch: int
    draft_length: int
    user: Estimate
    device: Estimate
    first_token: Estimate
    acceptance_length: float
    round_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The best point under the wanted service level, and the best of another mechanism or draft length."""

    best: Point
    runner_up: Point | None
    limit: str


def candidate(
    scenario: Scenario, mechanism: Mechanism, acceptance: Acceptance | None, batches: Sequence[int],
    longest: int, contexts: Sequence[float], calibration: Calibration | None = None,
) -> Candidate:  # fmt: skip
    """Evaluates a mechanism at draft lengths 0 to `longest` (or to its block)."""
    bound = mechanism.longest
    top = longest if bound is None else min(longest, bound)
    lengths = np.arange(top + 1, dtype=np.float64)
    grid = evaluate(scenario, mechanism, acceptance, np.asarray(batches, dtype=float), lengths, contexts)
    limits = np.stack([max_batches(scenario, mechanism, lengths, float(c)) for c in contexts], axis=-1)
    first = first_token_seconds(scenario, mechanism, grid)
    tokens = acceptance_sd(mechanism, acceptance, grid)
    cost = cost_sd(scenario, mechanism, acceptance, grid, calibration) if calibration else None
    return Candidate(mechanism, acceptance, scenario, grid, limits.astype(float), first, tokens, cost)


def _point(c: Candidate, i: int, d: int, k: int, spread: Spread) -> Point:
    g = c.grid
    kind = "none" if d == 0 else c.mechanism.label
    user, device = float(g.user_tokens_per_s[i, d, k]), float(g.device_tokens_per_s[i, d, k])
    tokens = float(g.tokens[0, d, k])
    ttft = float(c.first_token_s[i, d, k])
    own = c.spread_at(i, d, k, spread)
    return Point(
        kind, int(g.batches[i]), int(g.lengths[d]),
        own.around(user, "tokens/s/user"), own.around(device, "tokens/s/device"),
        spread.around(ttft, "s", inverse=True), tokens, float(g.round_s[i, d, k]) * 1e3,
    )  # fmt: skip


def envelope(candidates: Sequence[Candidate], spread: Spread, context: int = 0) -> list[Point]:
    """Points that no other beats in both rates, fastest user first."""
    found: list[tuple[float, float, int, int, int]] = []
    for n, c in enumerate(candidates):
        user, device = c.grid.user_tokens_per_s[:, :, context], c.grid.device_tokens_per_s[:, :, context]
        for i, d in zip(*np.nonzero(c.fits[:, :, context]), strict=True):
            found.append((float(user[i, d]), float(device[i, d]), n, int(i), int(d)))
    found.sort(key=lambda p: (-p[0], -p[1]))
    kept, best = [], 0.0
    for _, device_rate, n, i, d in found:
        if device_rate > best * (1 + 1e-9):
            kept.append(_point(candidates[n], i, d, context, spread))
            best = device_rate
    return kept


def break_even(c: Candidate, spread: Spread, context: int = 0) -> Estimate | None:
    """The largest batch up to which some draft length beats the plain engine; None where none ever does.

    The range comes from cost ratios off by the spread of validated ratios: both ends are the break-even
    batches under a ratio that much worse and better.
    """
    values = []
    for factor in (1.0, spread.ratio_high, spread.ratio_low):
        tokens = c.grid.tokens[0, 1:, context][None, :]
        ratio = 1 + (c.grid.cost_ratio[:, 1:, context] - 1) * factor
        plain = c.grid.plain_s[:, :, context]
        b = c.grid.batches[:, None]
        delay = c.grid.prefill_s[:, :, 0]
        spec = tokens / (ratio * plain + b * tokens * delay[:, 1:])
        gain = (spec * (plain + b * delay[:, :1])).max(axis=1) if tokens.size else np.zeros(len(b))
        wins = np.flatnonzero(gain > 1)
        values.append(float(c.grid.batches[wins[-1]]) if wins.size else 0.0)
    value, low, high = values
    if value == 0 and high == 0:
        return None
    at_end = value >= c.grid.batches[-1]
    note = "the largest batch looked at; speculation still wins there" if at_end else "validated cost ratios"
    return Estimate(value, min(low, value), max(high, value), "requests in a batch", Origin.ROOFLINE, note)


def service_level(
    candidates: Sequence[Candidate], spread: Spread, min_user: float | None, max_first_token: float | None,
    concurrency: int | None, context: int = 0,
) -> Answer:  # fmt: skip
    """Most tokens/s per device with at least `min_user` tokens/s a user and at most `max_first_token`
    seconds.

    Raises `Infeasible` with the nearest reachable figure where nothing satisfies the wish.
    """
    ranked: list[tuple[float, int, int, int]] = []
    fastest, reasons = 0.0, {"memory": 0, "speed": 0, "first token": 0}
    for n, c in enumerate(candidates):
        user = c.grid.user_tokens_per_s[:, :, context]
        rate = c.grid.device_tokens_per_s[:, :, context]
        allowed = np.ones_like(user, dtype=bool)
        if concurrency is not None:
            allowed &= c.grid.batches[:, None] * c.scenario.replicas <= max(concurrency, c.scenario.replicas)
        fits = allowed & c.fits[:, :, context]
        reasons["memory"] += int((allowed & ~fits).sum())
        fastest = max(fastest, float(np.max(user[fits], initial=0.0)))
        fast = fits & (user >= (min_user or 0.0))
        reasons["speed"] += int((fits & ~fast).sum())
        kept = fast & (c.first_token_s[:, :, context] <= (max_first_token or np.inf))
        reasons["first token"] += int((fast & ~kept).sum())
        ranked += [(float(rate[i, d]), n, int(i), int(d)) for i, d in zip(*np.nonzero(kept), strict=True)]
    if not ranked:
        raise Infeasible(_nothing(fastest, min_user, max_first_token, reasons))
    ranked.sort(reverse=True)
    _, n, i, d = ranked[0]
    best = _point(candidates[n], i, d, context, spread)
    other = next((r for r in ranked if _kind(candidates, r) != _kind(candidates, ranked[0])), None)
    if other is None:
        other = next((r for r in ranked if r[3] != d), None)
    runner = None if other is None else _point(candidates[other[1]], other[2], other[3], context, spread)
    return Answer(best, runner, max(reasons, key=lambda k: reasons[k]) if any(reasons.values()) else "none")


def _kind(candidates: Sequence[Candidate], row: tuple[float, int, int, int]) -> str:
    return "none" if row[3] == 0 else candidates[row[1]].mechanism.label


def _nothing(
    fastest: float, min_user: float | None, max_first_token: float | None, reasons: dict[str, int]
) -> str:
    if min_user is not None and fastest < min_user:
        return (
            f"no batch, draft length or mechanism given reaches {min_user:g} tokens/s per user; the fastest "
            f"reaches {fastest:.1f}: ask for less, add devices (--tp) or a drafter with higher acceptance"
        )
    if max_first_token is not None and reasons["first token"]:
        return (
            f"no point keeps the time to first token under {max_first_token:g} s; shorten prompts, add "
            "devices or "
            "allow more time"
        )
    return "nothing fits in memory; use more devices (--devices, --tp) or a smaller number format"
