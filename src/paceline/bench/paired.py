"""Paired runs: every prompt by every arm, in blocks one after the other in one process, in a turning order.

An arm is a way to answer prompts (an engine with a drafter, a server). Machines drift, so arms are compared on the
same prompt in the same round under the same load only. The speed of a run is its tokens after the first over the
seconds they took; a prompt's ratio is the geometric mean over the rounds, a workload's the geometric mean over its
prompts, with a bootstrap interval by prompt. Answers end where the model ends them.

A block is what an arm does at a stretch: at concurrency 1 one prompt, else all prompts of a kind, of which so many
are kept running at once (a closed loop: where one ends the next begins).

A drafter that remembers finished answers would replay the last one when a prompt is repeated (fault PL-10 of
public engines). So every run names its `tenant`, and memory does not cross tenants: under `cold` each run
has its own; under `kind` (warm) a run may draft from answers to other prompts of its kind in the same round, never
from one to its own prompt.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from paceline.bench.workloads import Workload, WorkloadPrompt
from paceline.errors import InvalidParameter

__all__ = [
    "POOLS",
    "Block",
    "Ratio",
    "Run",
    "RunKey",
    "Sample",
    "arm_order",
    "bootstrap_interval",
    "decode_speed",
    "first_difference",
    "first_speed",
    "geometric_mean",
    "paired_ratio",
    "plan_blocks",
    "prompt_ratios",
    "tenant",
]

POOLS = ("cold", "kind")


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """Which run: prompts by their id in the workload, rounds from 0; the last three say under which load."""

    kind: str
    prompt: str
    arm: str
    round: int
    concurrency: int = 1
    temperature: float = 0.0
    pool: str = "cold"

    @property
    def pair(self) -> tuple[str, str, int, int, float, str]:
        """What runs of different arms must share to be compared."""
        return (self.kind, self.prompt, self.round, self.concurrency, self.temperature, self.pool)


@dataclass(frozen=True, slots=True)
class Block:
    """See the module's docstring; `index` counts the blocks of one arm, round and load."""

    workload: Workload
    prompts: tuple[WorkloadPrompt, ...]
    arm: str
    round: int
    concurrency: int
    temperature: float
    pool: str
    index: int

    def run_keys(self) -> list[RunKey]:
        """The runs of the block, prompt by prompt."""
        load = (self.round, self.concurrency, self.temperature, self.pool)
        return [RunKey(self.workload.kind, p.id, self.arm, *load) for p in self.prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer.

    token_ids   with the token that ended it, where one did (`finish_reason` "stop")
    first_s     from the call to the first token
    decode_s    from the first token to the last
    rounds ...  counters of the engine (`DecodeStats`), 0 for arms that have none
    target_s, draft_s, other_s   seconds of the decode rounds in target passes, spent drafting, elsewhere;
                None for arms that do not say
    lengths, kept   by round: drafts proposed on the longest path, and accepted; empty for arms that do not say
    text, counted   what a server answered, and the tokens it says that was; None where `token_ids` tell
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    first_s: float
    decode_s: float
    rounds: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    emitted_in_draft_rounds: int = 0
    target_s: float | None = None
    draft_s: float | None = None
    other_s: float | None = None
    lengths: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    text: str | None = None
    counted: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) if self.counted is None else self.counted

    @property
    def words(self) -> Sequence[int]:
        """What texts are compared by: token ids, or characters where there are none."""
        return self.token_ids if self.text is None else [ord(c) for c in self.text]


@dataclass(frozen=True, slots=True)
class Run:
    key: RunKey
    sample: Sample

    def row(self) -> dict[str, Any]:
        """As one flat object, for a results file."""
        return asdict(self.key) | asdict(self.sample)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Run:
        keys, samples = ({f.name for f in fields(c)} for c in (RunKey, Sample))
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        return cls(
            RunKey(**{k: v for k, v in values.items() if k in keys}),
            Sample(**{k: v for k, v in values.items() if k in samples}),
        )


# -- running -----------------------------------------------------------------------------------------------


def plan_blocks(
    workloads: Sequence[Workload],
    arms: Sequence[str],
    rounds: int,
    *,
    concurrencies: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    pools: Sequence[str] = ("cold",),
) -> list[Block]:
    """Every block, in the order to run them: the arms of one block of prompts directly after one another."""
    for pool in pools:
        if pool not in POOLS:
            raise InvalidParameter("pool", pool, f"one of {', '.join(POOLS)}")
    planned: list[Block] = []
    loads = [(c, t, p) for t in temperatures for p in pools for c in concurrencies]
    for number in range(rounds):
        for workload in workloads:
            for concurrency, temperature, pool in loads:
                for index, prompts in enumerate(_cut(workload, concurrency)):
                    planned += [
                        Block(workload, prompts, arm, number, concurrency, temperature, pool, index)
                        for arm in arm_order(arms, index, number)
                    ]
    return planned


def _cut(workload: Workload, concurrency: int) -> list[tuple[WorkloadPrompt, ...]]:
    return [(p,) for p in workload.prompts] if concurrency == 1 else [workload.prompts]


def arm_order(names: Sequence[str], prompt: int, round: int) -> list[str]:
    """The arms forwards in even rounds and backwards in odd ones, turned by one with every prompt and pair of
    rounds: each comes first, and behind each of its neighbours, about equally often."""
    turn = prompt + round // 2
    turned = [names[(i + turn) % len(names)] for i in range(len(names))]
    return turned[::-1] if round % 2 else turned


def tenant(key: RunKey, pool: str) -> str:
    """Whose memory the run may use; see the module's docstring."""
    parts = [key.kind, key.arm, str(key.round), str(key.concurrency), str(key.temperature)]
    return "/".join([*parts, key.prompt] if pool == "cold" else parts)


# -- comparing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean over `prompts` prompts with its 95 % interval, which takes two prompts; else None."""

    prompts: int
    mean: float | None
    low: float | None
    high: float | None


def decode_speed(sample: Sample) -> float | None:
    """Tokens after the first per second after the first; None for answers of one token."""
    tokens = sample.tokens - 1
    return tokens / sample.decode_s if tokens > 0 and sample.decode_s > 0 else None


def first_speed(sample: Sample) -> float | None:
    """First tokens per second: the inverse of the time to the first token."""
    return 1.0 / sample.first_s if sample.first_s > 0 else None


def prompt_ratios(
    runs: Iterable[Run],
    arm: str,
    base: str,
    speed: Callable[[Sample], float | None] = decode_speed,
) -> dict[tuple[str, str], float]:
    """(kind, prompt) -> geometric mean of arm / base over the rounds that have both."""
    speeds: dict[tuple[str, str, int, int, float, str], dict[str, float]] = defaultdict(dict)
    for run in runs:
        value = speed(run.sample)
        if run.key.arm in (arm, base) and value is not None:
            speeds[run.key.pair][run.key.arm] = value
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (kind, prompt, *_), both in speeds.items():
        if arm in both and base in both:
            ratios[kind, prompt].append(both[arm] / both[base])
    return {key: geometric_mean(values) for key, values in ratios.items()}


def paired_ratio(
    runs: Iterable[Run],
    arm: str,
    base: str,
    speed: Callable[[Sample], float | None] = decode_speed,
    *,
    seed: int = 0,
) -> Ratio:
    """arm / base over all prompts of `runs`, with its interval."""
    ratios = prompt_ratios(runs, arm, base, speed)
    if not ratios:
        return Ratio(0, None, None, None)
    values = [ratios[key] for key in sorted(ratios)]
    low, high = bootstrap_interval(values, seed) if len(values) > 1 else (None, None)
    return Ratio(len(values), geometric_mean(values), low, high)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def bootstrap_interval(
    values: Sequence[float], seed: int, *, level: float = 0.95, resamples: int = 4000
) -> tuple[float, float]:
    """Percentile bootstrap of the geometric mean over `resamples` draws with replacement."""
    logs = np.log(np.asarray(values))
    picks = np.random.default_rng(seed).integers(len(logs), size=(resamples, len(logs)))
    means = np.sort(logs[picks].mean(axis=1)).tolist()
    tail = (1.0 - level) / 2.0
    low = means[max(0, math.floor(tail * resamples))]
    high = means[min(resamples - 1, math.ceil((1.0 - tail) * resamples) - 1)]
    return math.exp(low), math.exp(high)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where one of them ends before the other; None where equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
