"""Paired runs: every prompt by every arm, one after the other in one process, in a turning order.

An arm is a way to answer a prompt (an engine, a drafter). Machines drift, so arms are compared on the same
prompt in the same round only. The speed of a run is its tokens after the first over the seconds they took; a
prompt's ratio is the geometric mean over the rounds, a workload's the geometric mean over its prompts, with a
bootstrap interval by prompt. Answers end where the model ends them.

A drafter that remembers finished answers would replay the last one when a prompt is repeated (fault PL-10 of
public engines). So every run names its `tenant`, and memory does not cross tenants: under `cold` each run
has its own; under `kind` a run may draft from answers to other prompts of its kind in the same round, never
from one to its own prompt.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.bench.workloads import Workload, WorkloadPrompt
from paceline.errors import InvalidParameter

__all__ = [
    "POOLS",
    "Arm",
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
    "prompt_ratios",
    "run_paired",
    "tenant",
]

POOLS = ("cold", "kind")


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """Which run: prompts by their id in the workload, rounds from 0."""

    kind: str
    prompt: str
    arm: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer.

    token_ids   with the token that ended it, where one did (`finish_reason` "stop")
    first_s     from the call to the first token
    decode_s    from the first token to the last
    rounds ...  counters of the engine (`DecodeStats`), 0 for arms that have none
    target_s, draft_s, other_s   seconds of the decode rounds in target passes, spent drafting, elsewhere;
                None for arms that do not say
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
        values = {k: v for k, v in row.items() if k in samples} | {"token_ids": tuple(row["token_ids"])}
        return cls(RunKey(**{k: row[k] for k in keys}), Sample(**values))


Arm = Callable[[WorkloadPrompt, str], Sample]  # (prompt, tenant) -> its answer


# -- running -----------------------------------------------------------------------------------------------


def run_paired(
    workloads: Sequence[Workload],
    arms: Mapping[str, Arm],
    rounds: int,
    *,
    done: Collection[RunKey] = (),
    pool: str = "cold",
) -> Iterator[Run]:
    """The runs that are not `done`, as they are made: round by round, prompt by prompt, arm by arm."""
    if pool not in POOLS:
        raise InvalidParameter("pool", pool, f"one of {', '.join(POOLS)}")
    names = list(arms)
    for number in range(rounds):
        for workload in workloads:
            for index, prompt in enumerate(workload.prompts):
                for arm in arm_order(names, index, number):
                    key = RunKey(workload.kind, prompt.id, arm, number)
                    if key not in done:
                        yield Run(key, arms[arm](prompt, tenant(key, pool)))


def arm_order(names: Sequence[str], prompt: int, round: int) -> list[str]:
    """The arms forwards in even rounds and backwards in odd ones, turned by one with every prompt and pair of
    rounds: each comes first, and behind each of its neighbours, about equally often."""
    turn = prompt + round // 2
    turned = [names[(i + turn) % len(names)] for i in range(len(names))]
    return turned[::-1] if round % 2 else turned


def tenant(key: RunKey, pool: str) -> str:
    """Whose memory the run may use; see the module's docstring."""
    parts = [key.kind, key.arm, str(key.round)]
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
    tokens = len(sample.token_ids) - 1
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
    speeds: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    for run in runs:
        value = speed(run.sample)
        if run.key.arm in (arm, base) and value is not None:
            speeds[run.key.kind, run.key.prompt, run.key.round][run.key.arm] = value
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (kind, prompt, _), both in speeds.items():
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
    generator = random.Random(seed)
    logs = [math.log(v) for v in values]
    means = sorted(math.fsum(generator.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples))
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
