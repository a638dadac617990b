"""What a target pass costs by its rows, measured on this machine before the first draft length is chosen.

Only draft lengths depend on these timings, and under `coupled` and greedy the text does not depend on draft
lengths; so a noisy measurement costs speed, never exactness.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs

__all__ = ["PassCost", "time_passes"]

_ROWS = (1, 8, 16, 32, 64)
_REPEATS = 3


class PassCost:
    """`cost(rows)`: a pass in which each of `batch` sequences has `rows`, relative to one row each.

    rows, seconds   measured points, rows increasing; between them the cost is linear, past them it goes on as
                    between the last two
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(rows) == len(seconds) >= 2, f"{len(rows)} points of pass cost; two or more are needed"
        self._rows = list(rows)
        self._seconds = _rising(seconds)
        self.batch = 1

    def __call__(self, rows: int) -> float:
        return self.seconds(self.batch * rows) / self.seconds(self.batch)

    def seconds(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows."""
        right = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        r0, r1 = self._rows[right - 1], self._rows[right]
        t0, t1 = self._seconds[right - 1], self._seconds[right]
        return t0 + (t1 - t0) * (rows - r0) / (r1 - r0)


def time_passes(
    model: TargetModel,
    largest: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PassCost:
    """Time passes of 1 row up to about `largest` rows (at least 8) of one sequence, interleaved, the best of each.

    Keys are padded to whole blocks, so that an empty context costs what a short one does.
    """
    counts = [r for r in _ROWS if r <= max(largest, _ROWS[1])]
    cache = model.new_cache(1, counts[-1])
    cache.reserve_capacity(counts[-1])
    best = [float("inf")] * len(counts)
    for repeat in range(_REPEATS + 1):
        for i, rows in enumerate(counts):
            inputs = build_inputs([Span(0, 0, [0] * rows)], cache.capacity, model.geometry, model.row_policy)
            began = clock()
            float(model.forward(inputs, cache).logits[0, 0])
            if repeat:
                best[i] = min(best[i], clock() - began)
    return PassCost(counts, best)


def _rising(seconds: Sequence[float]) -> list[float]:
    """The running maximum: a pass over more rows is never taken to be cheaper."""
    out: list[float] = []
    for value in seconds:
        out.append(max([value, *out[-1:]]))
    return out
