"""What passes of a model cost by their rows, timed on this machine before the first draft length is chosen.

Only draft lengths depend on these timings, and under `coupled` and greedy the text does not depend on draft
lengths; so a noisy measurement costs speed, never exactness. The controller corrects them from its own rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs
from paceline.plan.control.cost import QUERY_OVERHEAD, LiveCost, StepTimes

__all__ = ["live_cost", "time_passes"]

_ROWS = (1, 8, 16, 32, 64)
_REPEATS = 3


def time_passes(
    model: TargetModel,
    largest: int,
    sequences: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Time passes of 1 row up to about `largest` rows (at least 8) of one sequence, interleaved, the best of each.

    With `sequences` above 1 one more pass, of a row of each, tells what attention over their keys costs. Keys are
    padded to whole blocks, so that an empty context costs what a short one does.
    """
    counts = [r for r in _ROWS if r <= max(largest, _ROWS[1])]
    layouts = [[Span(0, 0, [0] * rows)] for rows in counts]
    if sequences > 1:
        layouts.append([Span(slot, 0, [0]) for slot in range(sequences)])
    cache = model.new_cache(sequences, counts[-1])
    cache.reserve_capacity(counts[-1])
    best = [float("inf")] * len(layouts)
    for repeat in range(_REPEATS + 1):
        for i, spans in enumerate(layouts):
            inputs = build_inputs(spans, cache.capacity, model.geometry, model.row_policy)
            began = clock()
            float(model.forward(inputs, cache).logits[0, 0])
            if repeat:
                best[i] = min(best[i], clock() - began)
    seconds: list[float] = []
    for value in best[: len(counts)]:
        seconds.append(max([value, *seconds[-1:]]))  # a pass over more rows is never taken to be cheaper
    times = StepTimes(tuple(counts), tuple(seconds))
    if sequences == 1:
        return times
    block, keys = model.row_policy.multiple, model.row_policy.kv_block
    wide = -(-sequences // block) * block
    pairs = (sequences * (block + QUERY_OVERHEAD) - (wide + QUERY_OVERHEAD)) * keys
    return StepTimes(times.rows, times.seconds, max(0.0, best[-1] - times.at(sequences)) / pairs if pairs > 0 else 0.0)


def live_cost(model: TargetModel, max_batch: int, max_draft: int, seed: StepTimes | None = None) -> LiveCost:
    """The controller's cost of passes of `model`, seeded by `seed` or, without one, by timing some."""
    largest = min(max_batch * (1 + max_draft), model.max_positions)
    policy = model.row_policy
    seed = seed or time_passes(model, largest, min(max(max_batch, 4), 8))
    return LiveCost(seed, policy.multiple, max(largest, 64), policy.kv_block)
