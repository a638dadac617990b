"""What passes of a model cost by their rows, timed on this machine before the first draft length is chosen.

Only draft lengths depend on these timings, and under `coupled` and greedy the text does not depend on draft
lengths; so a noisy measurement costs speed, never exactness. The controller corrects them from its own rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs
from paceline.plan.control.cost import QUERY_OVERHEAD, Around, LiveCost, StepTimes

__all__ = ["live_cost", "time_passes"]

_ROWS = (1, 4, 8, 16, 32, 64)
_REPEATS = 3
_SLOW_ROWS, _SLOW_REPEATS = 32, 1  # from so many rows on, after the first
_CONTEXT = 256  # tokens of each sequence, past a block of keys, where attention is timed


def time_passes(
    model: TargetModel,
    largest: int,
    sequences: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Time passes of 1 row up to about `largest` rows (at least 8) of one sequence, interleaved, the best of each.

    Passes of many rows are repeated less often: they take longest and vary least.

    With `sequences` above 1 two more: of a row of each of them at the beginning of a text and at `_CONTEXT` tokens.
    What the second takes longer is attention's.
    """
    counts = [r for r in _ROWS if r <= max(largest, _ROWS[1])]
    layouts = [[Span(0, 0, [0] * rows)] for rows in counts]
    policy = model.row_policy
    context = min(policy.kv_block + _CONTEXT, model.max_positions) - 1
    if sequences > 1:
        layouts += [[Span(slot, start, [0]) for slot in range(sequences)] for start in (0, context)]
    cache = model.new_cache(sequences, max(counts[-1], context + 1))
    cache.reserve_capacity(cache.limit)
    if sequences > 1:
        cache.touch(context)
    best = [float("inf")] * len(layouts)
    for repeat in range(_REPEATS + 1):
        for i, spans in enumerate(layouts):
            if repeat > _SLOW_REPEATS and len(spans[0].tokens) >= _SLOW_ROWS:
                continue
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
    more = (context // policy.kv_block) * policy.kv_block  # keys, in whole blocks
    pairs = sequences * (policy.multiple + QUERY_OVERHEAD) * more
    return StepTimes(times.rows, times.seconds, max(0.0, best[-1] - best[-2]) / pairs if pairs > 0 else 0.0)


def live_cost(
    model: TargetModel,
    max_batch: int,
    max_draft: int,
    seed: StepTimes | None = None,
    around: Around | None = None,
) -> LiveCost:
    """The controller's cost of rounds of `model`, seeded by `seed` or, without one, by timing passes: then what is
    `around` them comes on top."""
    largest = min(max_batch * (1 + max_draft), model.max_positions)
    policy = model.row_policy
    if seed is None:
        seed = time_passes(model, largest, min(max(max_batch, 4), 8))
        seed = seed if around is None else around.beside(seed)
    return LiveCost(seed, policy.multiple, max(largest, 64), policy.kv_block)
