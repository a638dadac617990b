"""The draft length for each batch range and context band.

A dynamic program over batches: it pays the regret of each choice and a price for every change of draft
length, and never lets the length rise with the batch. So ranges come out merged and monotone, and the worst
regret of the result is known. D = 0 stands for the plain engine: where it is best, speculation is off. A
speculative server that runs D = 0 is slower than that (`Grid.idle_s`), and the plan says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter
from paceline.plan.rounds import Grid

__all__ = ["Band", "Entry", "best_lengths", "make_schedule"]

Array = npt.NDArray[np.float64]
HYSTERESIS = 0.10


@dataclass(frozen=True, slots=True)
class Entry:
    """Draft `length` for batches from `first` to `last`.

    regret         worst loss of throughput against the best length at the same batch, over the range
    leave_above    a running engine goes to the next entry only above this batch, and comes back only at or
                   below
    return_below   this one: both lie 10 % around the edge so that load at the edge does not switch every
                   round
    """

    first: int
    last: int
    length: int
    regret: float
    leave_above: int
    return_below: int


@dataclass(frozen=True, slots=True)
class Band:
    """The entries for contexts up to `context_up_to` tokens (None: all)."""

    context_up_to: float | None
    context: float
    entries: tuple[Entry, ...]

    def length_at(self, batch: float) -> int:
        for entry in self.entries:
            if batch <= entry.last:
                return entry.length
        return self.entries[-1].length

    @property
    def regret(self) -> float:
        return max(e.regret for e in self.entries)


def best_lengths(grid: Grid, context: int = 0) -> Array:
    """The fastest draft length at each batch, the plain engine standing for D = 0."""
    return grid.lengths[np.argmax(grid.user_tokens_per_s[:, :, context], axis=1)]


def make_schedule(
    grid: Grid, tolerance: float = 0.01, limits: Array | None = None, edges: list[float | None] | None = None
) -> list[Band]:
    """One `Band` a context of the grid. `tolerance` is the regret worth one change of draft length.

    limits   [length, context] largest batch that fits in memory with that draft length
    edges    upper context bound of each band; None for the last
    """
    if not 0 <= tolerance < 1:
        raise InvalidParameter("tolerance", tolerance, "a number from 0 up to 1")
    bounds = edges or [None] * len(grid.contexts)
    found = []
    for i, context in enumerate(grid.contexts):
        speeds = grid.user_tokens_per_s[:, :, i]
        if limits is not None:
            # Only batches that fit at every length: else memory, not speed, would pick the last few lengths.
            fit = limits[:, i].min() or limits[:, i].max()
            speeds = np.where(grid.batches[:, None] <= min(fit, limits[0, i]), speeds, 0.0)
        possible = speeds.max(axis=1) > 0
        if not possible.any():
            continue
        chosen, regret = _merge(speeds[possible], _doublings(grid.batches[possible]), tolerance)
        entries = _entries(grid.batches[possible], grid.lengths, chosen, regret)
        found.append(Band(bounds[i], float(context), entries))
    return found


def _doublings(batches: Array) -> Array:
    """How much of a doubling each batch stands for: small batches count as much as large ones."""
    edges = np.sqrt(batches[:-1] * batches[1:])
    return np.diff(np.log2(np.concatenate([[batches[0] / 2**0.5], edges, [batches[-1] * 2**0.5]])))


def _merge(speeds: Array, weights: Array, tolerance: float) -> tuple[npt.NDArray[np.intp], Array]:
    """Index of the length at each batch: non-increasing, least (weighted regret + tolerance per change)."""
    best = speeds.max(axis=1, keepdims=True)
    regret = 1 - speeds / best
    batches, lengths = regret.shape
    # An excess above the tolerance weighs five times: the worst loss of the schedule matters most.
    penalty = weights[:, None] * (regret + 4 * np.maximum(regret - tolerance, 0))
    cost = penalty[-1].copy()
    choice = np.zeros((batches, lengths), dtype=np.intp)
    for row in range(batches - 2, -1, -1):
        # From length j at this batch the next batch may keep j or go down to any shorter one.
        lowest = np.minimum.accumulate(cost)
        where = np.maximum.accumulate(np.where(cost == lowest, np.arange(lengths), 0))
        change = np.concatenate([[np.inf], lowest[:-1]]) + tolerance
        keep = cost <= change
        choice[row] = np.where(keep, np.arange(lengths), np.concatenate([[0], where[:-1]]))
        cost = penalty[row] + np.where(keep, cost, change)
    path = [int(np.argmin(cost))]
    for row in range(batches - 1):
        path.append(int(choice[row, path[-1]]))
    index = np.array(path)
    return index, regret[np.arange(batches), index]


def _entries(
    batches: Array, lengths: Array, chosen: npt.NDArray[np.intp], regret: Array
) -> tuple[Entry, ...]:
    starts = [0, *(np.flatnonzero(np.diff(chosen)) + 1)]
    ends = [*(s - 1 for s in starts[1:]), len(chosen) - 1]
    found = []
    for start, end in zip(starts, ends, strict=True):
        first = 1 if start == 0 else int(batches[start - 1]) + 1
        last = int(batches[end])
        final = end == len(chosen) - 1
        found.append(
            Entry(
                first,
                last,
                int(lengths[chosen[start]]),
                float(regret[start : end + 1].max()),
                last if final else max(last, int(np.ceil(last * (1 + HYSTERESIS)))),
                last if final else max(1, int(np.floor(last * (1 - HYSTERESIS)))),
            )
        )
    return tuple(found)
