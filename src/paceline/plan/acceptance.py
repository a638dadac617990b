"""Acceptance: how far the target follows a drafter.

    acceptance[i]   P(position i accepted | all before it were)        conditional, from 0 to 1
    survival[i]     running product of acceptance
    AL(D)           1 + survival[1] + ... + survival[D]                 1 <= AL <= 1 + D

0 and 1 are legal. Beyond the last known position the last value is held and the result is flagged as
extrapolated; block drafters are not extrapolated at all. A profile may depend on context (drafters trained
on short windows lose their touch beyond them) and is kept per sampling temperature: the greedy figure is not
the one at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.core.estimate import Estimate, Origin
from paceline.errors import InvalidParameter

__all__ = [
    "Acceptance",
    "Mixture",
    "acceptance_from_lengths",
    "acceptance_from_length",
    "acceptance_from_share",
    "acceptance_from_survival",
    "constant_acceptance",
]

Array = npt.NDArray[np.float64]


def _check(values: Sequence[float], name: str) -> None:
    if not values:
        raise InvalidParameter(name, tuple(values), "at least one number, by position")
    for i, value in enumerate(values, start=1):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise InvalidParameter(f"{name} at position {i}", value, "a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Conditional acceptance by position, with its origin.

    by_context   ((up to this context, conditional acceptance), ...) in rising order, beyond the last entry of
                 which its values hold; empty: `conditional` holds everywhere
    all_rounds   measured over every round, also those in which the drafter proposed nothing
    parts        (token share, profile) of the kinds of traffic a mixture was made of
    draws        [draws, positions] resampled conditional acceptance; empty: the spread is assumed
                 (`logit_sd`)
    """

    conditional: tuple[float, ...]
    source: str
    origin: Origin = Origin.MEASURED
    by_context: tuple[tuple[float, tuple[float, ...]], ...] = ()
    draws: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    logit_sd: float = 0.0
    temperature: float | None = None
    all_rounds: bool = False
    parts: tuple[tuple[float, Acceptance], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check(self.conditional, "acceptance")
        bounds = [upto for upto, _ in self.by_context]
        if bounds != sorted(set(bounds)):
            raise InvalidParameter("acceptance by context", bounds, "contexts in rising order, each once")
        for _, values in self.by_context:
            _check(values, "acceptance")

    def at(self, context: float) -> tuple[float, ...]:
        """Conditional acceptance at a context length."""
        for upto, values in self.by_context:
            if context <= upto:
                return values
        return self.by_context[-1][1] if self.by_context else self.conditional

    def survival(self, length: int, context: float = 0.0) -> Array:
        """survival[0..length-1]; positions beyond the known ones hold the last value."""
        return _survival(self.at(context), length)

    def lengths(self, longest: int, context: float = 0.0) -> Array:
        """AL(0), AL(1), ..., AL(longest)."""
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.survival(longest, context))])

    def extrapolated(self, length: int, context: float = 0.0) -> bool:
        return length > len(self.at(context))

    def length_draws(self, longest: int, count: int, seed: int, context: float = 0.0) -> Array:
        """[count, longest + 1] plausible AL curves: resampled where there are samples, assumed otherwise."""
        rng = np.random.default_rng(seed)
        known = self.at(context)
        if self.draws and not self.by_context:
            picks = rng.integers(len(self.draws), size=count)
            rows = [self.draws[i] for i in picks]
        else:
            shift = rng.normal(0.0, self.logit_sd, size=count) if self.logit_sd else np.zeros(count)
            rows = [tuple(_shifted(a, s) for a in known) for s in shift]
        curves = [np.concatenate([[1.0], 1.0 + np.cumsum(_survival(r, longest))]) for r in rows]
        return np.array(curves)

    def estimate(self, length: int, context: float = 0.0) -> Estimate:
        """AL at a draft length, with the 80 % range of `length_draws`."""
        value = float(self.lengths(length, context)[length])
        draws = self.length_draws(length, 400, 0, context)[:, length]
        low, high = np.quantile(draws, [0.1, 0.9])
        origin = Origin.ASSUMED if self.extrapolated(length, context) else self.origin
        note = " (extrapolated: the last known position held)" if self.extrapolated(length, context) else ""
        return Estimate(value, min(value, float(low)), max(value, float(high)), "tokens per round", origin,
                        self.source + note)  # fmt: skip


def _survival(known: Sequence[float], length: int) -> Array:
    padded = list(known[:length]) + [known[-1]] * max(0, length - len(known))
    return np.asarray(np.cumprod(np.array(padded, dtype=np.float64)), dtype=np.float64)


def _shifted(a: float, shift: float) -> float:
    if a in (0.0, 1.0):
        return a
    return 1 / (1 + math.exp(-(math.log(a / (1 - a)) + shift)))


def acceptance_from_survival(
    survival: Sequence[float], source: str, origin: Origin = Origin.MEASURED
) -> Acceptance:
    """From running products (prefix-accepted rates); they must not rise."""
    _check(survival, "survival")
    for i in range(1, len(survival)):
        if survival[i] > survival[i - 1] + 1e-9:
            raise InvalidParameter(
                f"survival at position {i + 1}",
                survival[i],
                f"at most the one before it ({survival[i - 1]:g}); if these are conditional rates use "
                "--acceptance",
            )
    before = [1.0, *survival[:-1]]
    conditional = tuple(min(1.0, s / b) if b > 0 else 0.0 for s, b in zip(survival, before, strict=True))
    return Acceptance(conditional, source, origin)


def acceptance_from_lengths(
    lengths: Sequence[float], source: str, origin: Origin = Origin.MEASURED
) -> Acceptance:
    """From AL(1), AL(2), ... of independent runs: increments made non-increasing first (runs are noisy)."""
    for d, al in enumerate(lengths, start=1):
        if not 1 <= al <= 1 + d:
            raise InvalidParameter(
                f"AL at draft length {d}",
                al,
                f"1 to {1 + d}: a round emits its own token and at most {d} drafts",
            )
    increments = np.diff([1.0, *lengths])
    survival = np.clip(_non_increasing(increments), 0.0, 1.0)
    return acceptance_from_survival([float(s) for s in survival], source, origin)


def _non_increasing(values: Array) -> Array:
    """Least-squares non-increasing fit (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] < mean:
            other, count = blocks.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        blocks.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in blocks])


def constant_acceptance(value: float, source: str, origin: Origin = Origin.ASSUMED) -> Acceptance:
    """The same conditional acceptance at every position."""
    return Acceptance((value,), source, origin)


def acceptance_from_length(length: float, draft_length: int, source: str) -> Acceptance:
    """The constant conditional acceptance under which AL(draft_length) = `length`."""
    if draft_length < 1:
        raise InvalidParameter("draft length", draft_length, "a whole number from 1")
    if not 1 <= length <= 1 + draft_length:
        raise InvalidParameter(
            "AL",
            length,
            f"1 to {1 + draft_length} at draft length {draft_length}: the target's own token counts, "
            "and no round emits more than 1 + D",
        )
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        if float(1 + np.cumsum(_survival([middle], draft_length))[-1]) < length:
            low = middle
        else:
            high = middle
    return Acceptance((round((low + high) / 2, 12),), source, Origin.INTERPOLATED)


def acceptance_from_share(share: float, draft_length: int, source: str) -> Acceptance:
    """From accepted / drafted tokens at one draft length. The share is not the per-token acceptance."""
    if not 0 <= share <= 1:
        raise InvalidParameter("accepted share", share, "a number from 0 to 1")
    return acceptance_from_length(1 + share * draft_length, draft_length, source)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Token-weighted kinds of traffic: share of output tokens and the acceptance of each.

    Time adds up, lengths do not: seconds per token = sum of share * T_round / AL, so the mixture's AL is the
    token-weighted harmonic mean (the arithmetic mean of ALs promises too much).
    """

    parts: tuple[tuple[float, Acceptance], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.parts]
        if not shares or any(not s > 0 for s in shares) or abs(sum(shares) - 1) > 1e-6:
            raise InvalidParameter("shares of the mixture", shares, "positive numbers that sum to 1")

    def lengths(self, longest: int, context: float = 0.0) -> Array:
        inverse = sum((share / a.lengths(longest, context) for share, a in self.parts), np.zeros(longest + 1))
        return np.asarray(1.0 / inverse)

    def merged(self, longest: int = 16) -> Acceptance:
        """One profile with the mixture's AL at every draft length."""
        bounds = sorted({upto for _, a in self.parts for upto, _ in a.by_context})
        source = " + ".join(f"{share:.0%} {a.source}" for share, a in self.parts)
        origin = max((a.origin for _, a in self.parts), key=list(Origin).index)
        known = min(longest, max(max(len(a.at(0)) for _, a in self.parts), 1))
        spread = max(a.logit_sd for _, a in self.parts)

        def at(context: float) -> tuple[float, ...]:
            increments = np.diff(self.lengths(max(known, 8), context))
            survival = np.minimum.accumulate(np.clip(increments, 0, 1))
            return acceptance_from_survival([float(s) for s in survival], source).conditional

        bands = tuple((upto, at(upto)) for upto in bounds)
        return Acceptance(at(0), source, origin, by_context=bands, logit_sd=spread, parts=self.parts)
