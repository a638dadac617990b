"""Seconds of a target pass by batch, rows of each sequence and context, from a probe's points.

At the context measured most, each batch has a curve over widths: the nearest one that never falls (more rows are
never taken to be cheaper; weights are the repeats), linear between its points, so that cliffs stay where they were
measured. Batches between two curves
are interpolated at equal width. Other contexts add `batch * (context - base) * (a + b * width)` with a and b from
0, fitted to the points measured there: attention reads the cache once a sequence and works once a row.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from paceline.errors import InvalidParameter
from paceline.plan.probe_file import PassTime

__all__ = ["PassTable", "resampled"]

_UNSEEN = 0.1  # log standard deviation of a timing whose spread is not known
Curve = tuple[list[float], list[float]]  # widths, seconds


class PassTable:
    """See the module's docstring. `points` need two widths of a batch at one context; `slopes` are a and b."""

    def __init__(self, points: Sequence[PassTime], value: Callable[[PassTime], float] | None = None) -> None:
        value = value or (lambda point: point.median_s)
        if not points:
            raise InvalidParameter("points", 0, "one or more timed passes")
        contexts = Counter(p.context for p in points)
        self.base = max(sorted(contexts), key=lambda c: contexts[c])
        curves: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
        for p in points:
            if p.context == self.base:
                curves[p.batch].append((p.width, value(p), len(p.seconds)))
        self._curves: dict[int, Curve] = {b: _rising(sorted(c)) for b, c in sorted(curves.items())}
        self.slopes = (0.0, 0.0)
        self.slopes = _fit([p for p in points if p.context != self.base], value, self)

    @property
    def batches(self) -> list[int]:
        return list(self._curves)

    def seconds(self, batch: int, width: int, context: float | None = None) -> float:
        """A pass in which each of `batch` sequences has `width` rows on `context` cached tokens (None: the base)."""
        known = self.batches
        right = bisect_left(known, batch)
        if right < len(known) and known[right] == batch:
            flat = _on(self._curves[batch], width)
        elif len(known) == 1:
            flat = _on(self._curves[known[0]], width * batch / known[0])  # as many rows
        else:
            right = min(max(right, 1), len(known) - 1)
            low, high = known[right - 1], known[right]
            t0, t1 = _on(self._curves[low], width), _on(self._curves[high], width)
            flat = t0 + (t1 - t0) * (batch - low) / (high - low)
        extra = 0.0 if context is None else batch * (context - self.base) * (self.slopes[0] + self.slopes[1] * width)
        return max(flat + extra, 0.25 * flat)

    def free_rows(self, tolerance: float = 0.1, batch: int = 1) -> int:
        """Rows up to which a pass of `batch` sequences takes at most 1 + `tolerance` times that of one row each."""
        widths = self._curves[batch][0]
        plain = self.seconds(batch, 1)
        free = [w for w in range(1, int(widths[-1]) + 1) if self.seconds(batch, w) <= (1 + tolerance) * plain]
        return batch * max(free, default=1)


def resampled(points: Sequence[PassTime], generator: random.Random) -> PassTable:
    """A table of medians of repeats drawn with replacement: one plausible machine.

    Fewer than three repeats do not tell their spread; then one of `_UNSEEN` is assumed.
    """

    def value(point: PassTime) -> float:
        drawn = statistics.median(generator.choices(point.seconds, k=len(point.seconds)))
        few = len(point.seconds) < 3
        return drawn * math.exp(generator.gauss(0.0, _UNSEEN)) if few else drawn

    return PassTable(points, value)


def _rising(points: Sequence[tuple[int, float, int]]) -> Curve:
    """(width, seconds, repeats) in rising width: pool what falls (adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, points
    for _, value, repeats in points:
        mean, weight, count = value, float(repeats), 1
        while pools and pools[-1][0] > mean:
            other, more, before = pools.pop()
            mean, weight, count = (mean * weight + other * more) / (weight + more), weight + more, count + before
        pools.append((mean, weight, count))
    return [float(w) for w, _, _ in points], [mean for mean, _, count in pools for _ in range(count)]


def _on(curve: Curve, width: float) -> float:
    """Linear between points; past them as between the two nearest, and never below the first."""
    widths, seconds = curve
    if len(widths) == 1:
        return seconds[0]
    right = min(max(bisect_left(widths, width), 1), len(widths) - 1)
    w0, w1, t0, t1 = widths[right - 1], widths[right], seconds[right - 1], seconds[right]
    return max(t0 + (t1 - t0) * (width - w0) / (w1 - w0), 0.5 * seconds[0])


def _fit(
    points: Sequence[PassTime], value: Callable[[PassTime], float], table: PassTable
) -> tuple[float, float]:
    """a and b of the module's docstring, by least squares, neither below 0."""
    if not points:
        return 0.0, 0.0
    moved = [p.batch * (p.context - table.base) for p in points]
    extra = np.array([value(p) - table.seconds(p.batch, p.width) for p in points])
    columns = np.array([[m, m * p.width] for m, p in zip(moved, points, strict=True)], dtype=float)
    best, error = (0.0, 0.0), float(extra @ extra)
    for kept in ([0, 1], [0], [1]):
        found = np.linalg.lstsq(columns[:, kept], extra, rcond=None)[0]
        left = extra - columns[:, kept] @ found
        if (found >= 0).all() and float(left @ left) < error:
            both = np.zeros(2)
            both[kept] = found
            best, error = (float(both[0]), float(both[1])), float(left @ left)
    return best
