"""Times of passes by batch, width and context, made in turns so that every point sees the same machine.

A pass of a draft model is rows laid out, the pass, the most probable token of every row. Of a target it is the pass
alone, and what a round takes `around` it comes on top. The cache holds zeros; how long a pass takes does not depend on
what it reads, as long as it was written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.decode.cache import KVCache
from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs
from paceline.decode.verify.probabilities import greedy_tokens
from paceline.plan.control.cost import Around
from paceline.plan.probe_file import PassTime

__all__ = ["PassTimer", "Point"]

Point = tuple[int, int, int]  # batch, width, context


class PassTimer:
    """Repeats of the points of one model.

    prefill   each point is one prompt chunk of `width` tokens, of which the last row is wanted
    around    what a round takes beside its pass; None times a step of a draft model
    """

    def __init__(
        self,
        model: TargetModel,
        points: Sequence[Point],
        *,
        prefill: bool = False,
        around: Around | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self._prefill, self._around, self._clock = model, prefill, around, clock
        self._points = [p for p in dict.fromkeys(points) if p[1] + p[2] <= model.max_positions]
        self._seconds: dict[Point, list[float]] = {}
        self._sweeps = 0
        self._caches: dict[int, KVCache] = {}

    def sweep(self, points: Sequence[Point] | None = None) -> None:
        """Every point once more, forwards and backwards by turns: a drifting machine slows both ends alike."""
        self._sweeps += 1
        for point in list(self._points if points is None else points)[:: 1 if self._sweeps % 2 else -1]:
            self._seconds.setdefault(point, []).append(self._run(point))

    def widest(self, share: float) -> list[Point]:
        """The points whose medians are least sure, that share of them."""
        unsure = sorted(self._points, key=lambda p: -self._doubt(p))
        return unsure[: max(1, round(share * len(unsure)))]

    def times(self) -> tuple[PassTime, ...]:
        """What was measured so far, without the first run of a point once there are two more: it is the slowest."""
        return tuple(PassTime(*p, self._kept(p)) for p in self._points if p in self._seconds)

    def _kept(self, point: Point) -> tuple[float, ...]:
        seconds = self._seconds.get(point, [])
        return tuple(seconds[1:] if len(seconds) > 2 else seconds)

    def _doubt(self, point: Point) -> float:
        seconds = self._kept(point)
        if len(seconds) < 3:
            return float(10 - len(self._seconds.get(point, [])))
        return PassTime(*point, seconds).spread / len(seconds) ** 0.5

    def _run(self, point: Point) -> float:
        batch, width, context = point
        cache = self._cache(batch, width + context)
        began = self._clock()
        spans = [
            Span(slot, context, [0] * width, want="last" if self._prefill else "all", prefill=self._prefill)
            for slot in range(batch)
        ]
        inputs = build_inputs(spans, cache.capacity, self.model.geometry, self.model.row_policy)
        laid_out = self._clock()
        logits = self.model.forward(inputs, cache).logits
        if self._around is not None:
            float(logits[0, 0])  # waits for a device that computes beside
            return self._clock() - laid_out + self._around.at(batch, batch * width)
        tokens, usable = greedy_tokens(logits, self.model.vocab_width)
        tokens.tolist(), usable.tolist()
        return self._clock() - began

    def _cache(self, slots: int, tokens: int) -> KVCache:
        """A cache of that many slots, long enough; one for each number of slots, as an engine has one in all."""
        known = self._caches.get(slots)
        if known is None or known.capacity < tokens:
            longest = max(w + c for b, w, c in [*self._points, (slots, tokens, 0)] if b == slots)
            known = self.model.new_cache(slots, longest)
            known.touch(longest)
            self._caches[slots] = known
        return known
