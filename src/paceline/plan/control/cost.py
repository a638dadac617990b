"""What rounds cost here and now: seconds of a target pass by its rows, and of each drafter's steps, kept live.

    seconds = speed * (A[rows] + key_s * keys + sequence_s * sequences)

`A` is a staircase over padded row counts, seeded by a few passes timed at load or by a probe, and corrected step
by step from the engine's own rounds; `keys` are query-key pairs (padded queries of each sequence times its
context); `sequence_s` is what a round does for each sequence around the pass, as timed; `speed` is how slow the
machine is at the moment, followed within some ten rounds. Because the speed is common to all rows, a machine that
slows down while one draft length is in use does not make that length look dear; a round tells of its own step only
as far as its neighbours in time were of others.

Guarantees: A never falls with rows (weighted isotonic regression); a cliff that was seen stays a cliff (steps
are not smoothed, only those never visited are interpolated); a stall of the machine counts as a small error
(errors are clipped to a few times their usual size); old rounds fade.
Source: clipping after Huber (1964); isotonic regression by pooling of adjacent violators.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

__all__ = ["QUERY_OVERHEAD", "Around", "LiveCost", "RoundView", "StepTimes", "isotonic"]

_SPEED_SHARE = 0.1  # of an error that goes to the speed: it forgets within about ten rounds
_STEP_MEMORY = 40.0  # visits after which a step's old errors have faded
_KEY_SHARE = 0.02
_FIRST_LOOKS = 5
_RECENT = 16  # rounds; a step that had all of them is not told apart from the speed, and learns nothing
_CHANGED = 3  # clipped errors to one side in a row
_CLIP = 3.0  # usual errors; a larger one counts as this
_CLIPPED_TRUST = 0.3  # how far a step follows a clipped error: more likely the machine changed than the step
_REFRESH = 8  # rounds between rebuilds of the table
QUERY_OVERHEAD = 4  # an attention call over q queries costs as q + 4 of them (measured, docs/log.md)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a pass by its rows, as timed: rows rising. Linear between the points and past them.

    key_s        seconds of a query-key pair, 0.0 where it is not known
    sequence_s   seconds that each sequence adds to a round beside its rows and keys, that of the first in `seconds`
    """

    rows: Seq[int]
    seconds: Seq[float]
    key_s: float = 0.0
    sequence_s: float = 0.0

    def at(self, rows: float) -> float:
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        r0, r1 = self.rows[right - 1], self.rows[right]
        t0, t1 = self.seconds[right - 1], self.seconds[right]
        return max(t0 + (t1 - t0) * (rows - r0) / (r1 - r0), min(self.seconds))


@dataclass(frozen=True, slots=True)
class Around:
    """Seconds of a round beside its pass and its drafting: fixed_s + sequence_s * sequences + row_s * rows."""

    fixed_s: float
    sequence_s: float
    row_s: float

    def at(self, sequences: int, rows: int) -> float:
        return self.fixed_s + self.sequence_s * sequences + self.row_s * rows

    def beside(self, passes: StepTimes) -> StepTimes:
        """Whole rounds of one sequence, from its passes."""
        seconds = tuple(s + self.at(1, rows) for rows, s in zip(passes.rows, passes.seconds, strict=True))
        return StepTimes(passes.rows, seconds, passes.key_s, self.sequence_s)


class LiveCost:
    """See the module's docstring.

    seed      times known at the start
    block     rows of a pass, and queries of a sequence, are padded to a multiple of this
    largest   rows of the largest pass
    kv_block  keys of a sequence are padded to a multiple of this
    """

    def __init__(self, seed: StepTimes, block: int = 1, largest: int = 256, kv_block: int = 1) -> None:
        self.block, self.kv_block = block, kv_block
        self.key_s, self.sequence_s = seed.key_s, seed.sequence_s
        self._first_key_s = seed.key_s
        steps = -(-largest // block)
        own = seed.key_s * kv_block  # attention of the one sequence that was timed, short of a block of keys
        self._seed = [
            max(seed.at(rows) - own * (rows + QUERY_OVERHEAD) - seed.sequence_s, 0.2 * seed.at(rows))
            for rows in range(block, (steps + 1) * block, block)
        ]
        self._error = [0.0] * steps  # log of what was measured over the seed, by step
        self._visits = [0.0] * steps
        self._log_speed, self._spread = 0.0, 0.05
        self._tabulate(self._seed, [1.0] * steps)
        self._stale = 0
        self.rounds = 0
        self._first: list[float] = []
        self._run, self._last = 0, 0.0
        self._recent = deque([-1] * _RECENT, maxlen=_RECENT)

    @property
    def speed(self) -> float:
        return math.exp(self._log_speed)

    def keys(self, queries: int, context: int) -> int:
        """Query-key pairs of a sequence with so many queries over so many tokens."""
        return self.all_keys((queries,), (context,))

    def all_keys(self, queries: Iterable[int], contexts: Iterable[int]) -> int:
        """Those of several sequences together."""
        block, kv_block, total = self.block, self.kv_block, 0
        for own, context in zip(queries, contexts, strict=True):
            total += (-(-own // block) * block + QUERY_OVERHEAD) * (-(-context // kv_block) * kv_block)
        return total

    def step(self, rows: int) -> int:
        return min(max(-(-rows // self.block) - 1, 0), len(self._seed) - 1)

    def seconds(self, rows: int, keys: int, sequences: int) -> float:
        """Of a round without drafting and without prompts."""
        return self.speed * (self._rows_s(rows) + self.key_s * keys + self.sequence_s * sequences)

    def at_start(self, sequences: int, keys: int) -> float:
        """Of a plain round of so many sequences, at the prices that were known at the start."""
        return self._seed[self.step(sequences)] + self._first_key_s * keys + self.sequence_s * sequences

    def observe(self, rows: int, keys: int, sequences: int, seconds: float) -> None:
        """A round took `seconds` beside drafting; rounds that hold prompt rows are not to be given."""
        if seconds <= 0.0 or rows > len(self._seed) * self.block:
            return
        expected = self.seconds(rows, keys, sequences)
        error = math.log(seconds / expected)
        self.rounds += 1
        if self.rounds <= _FIRST_LOOKS:  # the speed alone, by a median: the first round may be a stall
            self._first.append(error + self._log_speed)
            self._log_speed = sorted(self._first)[(len(self._first) - 1) // 2]
            return
        clipped = min(max(error, -_CLIP * self._spread), _CLIP * self._spread)
        self._spread = min(max(0.97 * self._spread + 0.03 * min(1.5 * abs(error), 0.5), 0.02), 0.3)
        self._run = self._run + 1 if abs(error) > abs(clipped) and error * self._last > 0.0 else 0
        self._last = error
        if self._run >= _CHANGED:  # no stall: the machine has another speed now
            self._log_speed, self._run = self._log_speed + error, 0
            return
        self._log_speed += _SPEED_SHARE * clipped
        step = self.step(rows)
        self._visits[step] = min(self._visits[step] + 1.0, _STEP_MEMORY)
        trust = 1.0 if clipped == error else _CLIPPED_TRUST
        trust *= 1.0 - self._recent.count(step) / len(self._recent)
        self._error[step] += trust * clipped / (0.5 * self._visits[step] + 1.0)
        self._recent.append(step)
        if self.key_s:
            share = self.key_s * keys * self.speed / expected
            self.key_s *= math.exp(_KEY_SHARE * share * clipped)
        self._stale += 1
        if self._stale >= _REFRESH:
            self._rebuild()

    def view(self, contexts: Seq[int]) -> RoundView:
        """The cost of a round over sequences of these contexts, one block of queries each."""
        keys = self.all_keys([1] * len(contexts), contexts)
        return RoundView(self, self.speed, self.speed * (self.key_s * keys + self.sequence_s * len(contexts)))

    def _rows_s(self, rows: int) -> float:
        step = -(-rows // self.block) - 1
        last = len(self._table) - 1
        if step <= last:
            return self._table[max(step, 0)]
        return self._table[last] + (step - last) * (self._table[last] - self._table[last // 2]) / max(
            last - last // 2, 1
        )

    def _rebuild(self) -> None:
        """The table from seed and errors; steps never visited take the errors of their neighbours."""
        self._stale = 0
        known = [i for i, visits in enumerate(self._visits) if visits > 0.0]
        error, exp = self._error, math.exp
        factors = [exp(error[known[0]])] * (known[0] + 1)
        for low, high in pairwise(known):
            start, rise = error[low], error[high] - error[low]
            factors += [exp(start + (i - low) / (high - low) * rise) for i in range(low + 1, high)]
            factors.append(exp(error[high]))
        factors += factors[-1:] * (len(error) - len(factors))
        self._tabulate(list(map(mul, self._seed, factors)), [visits or 0.25 for visits in self._visits])

    def _tabulate(self, values: Seq[float], weights: Seq[float]) -> None:
        self._table = isotonic(values, weights)
        self.flat = [self._table[0], *(value for value in self._table for _ in range(self.block))]


class RoundView:
    """A `RoundCost` of one round, at the speed of the moment. Drafters' steps are added by `draft`."""

    def __init__(self, cost: LiveCost, speed: float, fixed_s: float) -> None:
        self.block = cost.block
        self._cost, self._speed, self._fixed_s = cost, speed, fixed_s
        self._steps: dict[int, StepTimes] = {}
        self._factor: dict[int, float] = {}
        self._known: dict[tuple[int, int], float] = {}

    def draft(self, drafter: int, times: StepTimes, factor: float = 1.0) -> None:
        """Steps of `drafter` take `factor` times `times`, by sequences."""
        self._steps[drafter], self._factor[drafter] = times, factor * self._speed

    def pass_s(self, rows: int) -> float:
        flat = self._cost.flat
        return self._speed * (flat[rows] if rows < len(flat) else self._cost._rows_s(rows)) + self._fixed_s

    def passes_s(self, rows: int, count: int) -> list[float]:
        speed, fixed_s = self._speed, self._fixed_s
        known = [speed * seconds + fixed_s for seconds in self._cost.flat[rows : rows + count]]
        return known + [self.pass_s(more) for more in range(rows + len(known), rows + count)]

    def step_s(self, drafter: int, sequences: int) -> float:
        known = self._known.get((drafter, sequences))
        if known is None:
            known = self._factor[drafter] * self._steps[drafter].at(sequences)
            self._known[drafter, sequences] = known
        return known

    def block_s(self, context: int) -> float:
        """Of one more block of queries over `context` tokens."""
        keys = -(-context // self._cost.kv_block) * self._cost.kv_block
        return self._speed * self._cost.key_s * self.block * keys


def isotonic(values: Seq[float], weights: Seq[float]) -> list[float]:
    """The never-falling sequence nearest to `values` in weighted squares."""
    means: list[float] = []  # of pools, rising, with their weights and members
    loads: list[float] = []
    sizes: list[int] = []
    for mean, load in zip(values, weights, strict=True):
        size = 1
        while means and means[-1] > mean:
            heavy = loads.pop()
            mean = (means.pop() * heavy + mean * load) / (heavy + load)
            load += heavy
            size += sizes.pop()
        means.append(mean)
        loads.append(load)
        sizes.append(size)
    return [mean for mean, size in zip(means, sizes, strict=True) for _ in range(size)]
