"""`paceline bench` at work: its arms, its blocks in turns, and what is measured beside them.

Beside the blocks, passes are timed in the same minutes (at the start, in between and at the end), and the drafters
are replayed over plain decoding's own texts: that gives the predicted times, the bound of hindsight, and the choice
of the fixed settings that are worth running. Results are kept line by line, a block a line; a run that was cut off
goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.loads import BlockTimes, EngineLoad, Load, TransformersLoad, params_of
from paceline.bench.paired import Block, Run, RunKey, plan_blocks
from paceline.bench.pass_timer import PassTimer
from paceline.bench.probe import (
    assemble,
    chat_ids,
    drafters_of,
    make_text,
    make_timers,
    replay_all,
    replayed,
)
from paceline.bench.reference import Reference
from paceline.bench.results import ResultFile
from paceline.bench.workloads import Workload
from paceline.core.output import Completion, DecodeStats
from paceline.core.records import StepRecord
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.auto import AutoDrafter
from paceline.decode.engine import Engine
from paceline.decode.llm import LLM
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.sequence import DraftSettings
from paceline.errors import InvalidParameter
from paceline.plan.advice import advise
from paceline.plan.probe_file import ProbeFile, short_name

__all__ = ["AUTO", "PLAIN", "TRANSFORMERS", "ArmSpec", "BenchPlan", "BlockResult", "arms_of", "best_fixed",
           "gap_between", "measure", "run_blocks"]  # fmt: skip

PLAIN, AUTO, TRANSFORMERS = "plain", "auto", "transformers"


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm by its name: who drafts, and how far; None lets the controller choose."""

    name: str
    drafter: str | None
    draft_length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to run; see `plan_blocks`. `max_tokens` of an answer."""

    workloads: Sequence[Workload]
    concurrencies: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    pools: Sequence[str] = ("cold",)
    rounds: int = 3
    max_tokens: int = 128


@dataclass(frozen=True, slots=True)
class BlockResult:
    """One block that was run. `key` is that of its first run, and tells the load."""

    key: RunKey
    index: int
    runs: tuple[Run, ...]
    times: BlockTimes

    def row(self) -> dict[str, Any]:
        return {"row": "block", "index": self.index, "runs": [r.row() for r in self.runs], "times": self.times.row()}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> BlockResult:
        runs = tuple(Run.of_row(r) for r in row["runs"])
        return cls(runs[0].key, row["index"], runs, BlockTimes.of_row(row["times"]))


def arms_of(llm: LLM, lengths: Sequence[int | None]) -> list[ArmSpec]:
    """Plain for 0, the controller for None, and every drafter for each other length. Plain is always there."""
    made = [ArmSpec(PLAIN, None, 0)]
    if None in lengths and llm.defaults.drafter != "none":
        made.append(ArmSpec(AUTO, llm.defaults.drafter, None))
    fixed = [length for length in lengths if length]
    if fixed and llm.defaults.drafter == "none":
        raise InvalidParameter("--draft-length", fixed, "0 where nothing drafts", "Give --draft.")
    made += [ArmSpec(f"{short_name(n)} D={d}", n, d) for n in drafters_of(llm) for d in fixed]
    return made


def best_fixed(probe: ProbeFile, arms: Sequence[ArmSpec], concurrencies: Sequence[int], count: int) -> list[ArmSpec]:
    """Plain, the controller, and the `count` fixed arms with the highest gain in the probe, over its temperatures
    and all `concurrencies` (geometric mean)."""
    logs: dict[str, float] = {}
    for temperature in sorted({t.temperature for t in probe.texts}):
        texts = [t for t in probe.texts if t.temperature == temperature]
        for advice in advise(probe, texts, concurrencies):
            known = dict(advice.gains)
            for arm in arms:
                if arm.draft_length:
                    logs[arm.name] = logs.get(arm.name, 0.0) + math.log(known.get((arm.drafter, arm.draft_length), 1.0))
    chosen = sorted(logs, key=lambda name: -logs[name])[:count]
    return [arm for arm in arms if not arm.draft_length or arm.name in chosen]


# -- blocks ------------------------------------------------------------------------------------------------


def run_blocks(
    plan: BenchPlan,
    loads: Mapping[str, Load],
    results: ResultFile,
    progress: Callable[[float, str], None] = lambda share, text: None,
    between: Callable[[], None] = lambda: None,
) -> list[BlockResult]:
    """Run what is missing of the plan, a block a line in `results`; `between` is called some five times on the way."""
    blocks = plan_blocks(
        plan.workloads,
        list(loads),
        plan.rounds,
        concurrencies=plan.concurrencies,
        temperatures=plan.temperatures,
        pools=plan.pools,
    )
    known = [BlockResult.of_row(row) for row in results.rows if row["row"] == "block"]
    done = {(r.key, r.index) for r in known}
    missing = [b for b in blocks if (b.run_keys()[0], b.index) not in done]
    if missing:
        _warm_up(missing[0], loads)
    for number, block in enumerate(missing):
        progress(number / len(missing), f"round {block.round + 1}, {block.workload.kind}, {block.arm}")
        if number % max(len(missing) // 5, 1) == 0:
            between()
        samples, times = loads[block.arm](block)
        runs = tuple(Run(key, sample) for key, sample in zip(block.run_keys(), samples, strict=True))
        known.append(BlockResult(runs[0].key, block.index, runs, times))
        results.append(known[-1].row())
    if missing:
        between()
    wanted = {(b.run_keys()[0], b.index) for b in blocks}
    return [r for r in known if (r.key, r.index) in wanted]


def _warm_up(block: Block, loads: Mapping[str, Load]) -> None:
    """One answer by each arm, thrown away: the first call of anything is slower."""
    for name, load in loads.items():
        load(replace(block, prompts=block.prompts[:1], arm=name, round=-1, concurrency=1))


# -- beside the blocks -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Beside:
    """Passes timed in the same minutes, and replays over plain decoding's texts."""

    llm: LLM
    largest: int
    clock: Callable[[], float] = time.perf_counter
    timers: dict[str, PassTimer] = field(default_factory=dict)

    def sweep(self) -> None:
        if not self.timers:
            self.timers = make_timers(self.llm, drafters_of(self.llm), self.clock, self.largest)
        for timer in self.timers.values():
            timer.sweep()

    def probe(self, plan: BenchPlan, results: Sequence[BlockResult]) -> ProbeFile:
        """Of the first round of plain decoding at the lowest concurrency and every temperature."""
        drafters = drafters_of(self.llm)
        prompts = {(w.kind, p.id): p for w in plan.workloads for p in w.prompts}
        costs: dict[str, list[float]] = {name: [] for name in drafters}
        texts = []
        for run in _plain_runs(results, min(plan.concurrencies)):
            prompt = prompts[run.key.kind, run.key.prompt]
            params = params_of(prompt, run.key.temperature, plan.max_tokens)
            text = make_text(self.llm, chat_ids(self.llm, prompt), _completion(run), params)
            drafts, seconds = replay_all(drafters, text)
            for name, value in seconds.items():
                costs[name].append(value)
            texts.append(replayed(text, run.key.kind, prompt.id, drafts))
        if not self.timers:
            self.sweep()
        return assemble(self.llm, drafters, self.timers, costs, texts, 0.0)


def _plain_runs(results: Sequence[BlockResult], concurrency: int) -> list[Run]:
    first = min((r.key.round for r in results), default=0)
    pools = sorted({r.key.pool for r in results})
    return [
        run
        for result in results
        if (result.key.arm, result.key.round, result.key.concurrency) == (PLAIN, first, concurrency)
        and result.key.pool == pools[0]
        for run in result.runs
    ]


def _completion(run: Run) -> Completion:
    reason: Any = run.sample.finish_reason
    return Completion(0, "", list(run.sample.token_ids), reason, DecodeStats())


def gap_between(
    llm: LLM, prompt: Sequence[int], output: Sequence[int], other: Sequence[int], index: int
) -> float | None:
    """How far the log-probabilities of the two tokens at a parting lie apart; None where one text just ends or a
    token is not among the fifty most probable."""
    if index >= min(len(output), len(other)):
        return None
    params = SamplingParams(max_tokens=1, logprobs=50)
    made = llm.generate([[*prompt, *output[:index]]], params, draft=DraftSettings("none"))[0].completions[0]
    assert made.logprobs is not None, "log-probabilities were asked for"
    known = dict(made.logprobs[0].top)
    if output[index] not in known or other[index] not in known:
        return None
    return abs(known[output[index]] - known[other[index]])


def engine_without_controller(llm: LLM, records: list[StepRecord]) -> Engine:
    """A second engine over the same weights and drafters, with a cache of its own. The controller neither takes time
    there nor learns from what others do."""
    drafters = {n: d for n, d in llm.draft_set.drafters.items() if not isinstance(d, AutoDrafter)}
    return Engine(
        llm.engine.model,
        vocab_size=llm.checkpoint.vocab_size,
        eos_token_ids=llm.checkpoint.eos_token_ids,
        drafters=drafters,
        options=llm.engine.options,
        new_pieces=None if llm.tokenizer is None else llm.tokenizer.stream,
        on_record=records.append,
    )


def measure(
    llm: LLM,
    arms: Sequence[ArmSpec],
    records: list[StepRecord],
    plan: BenchPlan,
    results: ResultFile,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> tuple[list[BlockResult], ProbeFile]:
    """Blocks of arms on one engine of ours, and what was measured beside them."""
    loads: dict[str, Load] = {}
    alone = engine_without_controller(llm, records)
    for arm in arms:
        if arm.name == TRANSFORMERS:
            reference = Reference(load_checkpoint(llm.checkpoint.name, dtype=llm.dtype))
            loads[arm.name] = TransformersLoad(llm, reference, plan.max_tokens)
        else:
            settings = DraftSettings(arm.drafter or "none", arm.draft_length)
            engine = llm.engine if arm.draft_length is None else alone
            loads[arm.name] = EngineLoad(llm, engine, settings, records, plan.max_tokens)
    beside = Beside(llm, max(plan.concurrencies))
    found = run_blocks(plan, loads, results, progress, beside.sweep)
    kept = [row["probe"] for row in results.rows if row["row"] == "probe"]
    if kept and not beside.timers:
        return found, ProbeFile.of(kept[-1])
    probe = beside.probe(plan, found)
    results.append({"row": "probe", "probe": probe.as_json()})
    return found, probe
