"""Blocks of prompts under a closed loop, on an engine of ours: so many requests are kept running until none is left.

Everything is timed from outside: a request's first token, its last, the whole block. What the rounds were made of
comes from the engine's own records; a round belongs to the block once, however many requests took part in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from paceline.bench.paired import Block, Sample, tenant
from paceline.bench.probe import chat_ids, seed_of
from paceline.bench.reference import Reference
from paceline.bench.workloads import WorkloadPrompt
from paceline.core.records import StepRecord
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.build import share_target
from paceline.decode.engine import Engine
from paceline.decode.llm import LLM, completion
from paceline.decode.sequence import DraftSettings, Request
from paceline.decode.sequence import Sequence as Choice
from paceline.errors import RequestFailed

__all__ = ["BlockTimes", "EngineLoad", "Load", "Rounds", "TransformersLoad", "params_of"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of one shape: `batch` sequences decoding, `rows` in the pass, `drafted` draft tokens in the longest path.

    context   committed tokens of a sequence, the mean over all
    target_s, draft_s, other_s   seconds of all of them together
    """

    batch: int
    rows: int
    drafted: int
    count: int
    context: float
    target_s: float
    draft_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Of a whole block.

    wall_s    from the first request's start to the last token
    tokens    of all answers
    rounds    those in which everything decoded
    saved_s   against plain decoding that was not run, as the controller reckons live; None where none did
    """

    wall_s: float
    tokens: int
    rounds: tuple[Rounds, ...] = ()
    saved_s: float | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> BlockTimes:
        return cls(row["wall_s"], row["tokens"], tuple(Rounds(**r) for r in row["rounds"]), row.get("saved_s"))


Load = Callable[[Block], tuple[list[Sample], BlockTimes]]


def params_of(prompt: WorkloadPrompt, temperature: float, max_tokens: int) -> SamplingParams:
    """The same for every arm: natural stops, and a seed that belongs to the prompt."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed_of(prompt))


@dataclass(slots=True)
class _Running:
    """One request while it runs: its choice, when it began, and when its first and last tokens came."""

    choice: Choice
    began: float
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class EngineLoad:
    """An arm on an engine of ours.

    llm       whose tokenizer and checkpoint these are
    engine    that answers: without a controller for arms that do not ask it, so that it learns from its own alone
    records   the list that the engine's `on_record` appends to; emptied at every block
    """

    llm: LLM
    engine: Engine
    settings: DraftSettings
    records: list[StepRecord]
    max_tokens: int
    clock: Callable[[], float] = time.perf_counter
    _ids: count[int] = field(default_factory=count)

    def __call__(self, block: Block) -> tuple[list[Sample], BlockTimes]:
        engine = self.engine
        share_target(engine.drafters.drafters.values(), engine.model, engine.cache)
        waiting = [self._request(block, i) for i in range(len(block.prompts))]
        running: dict[str, _Running] = {}
        alive = 0
        self.records.clear()
        saved = self._saved_s()
        began = ended = self.clock()
        while waiting or alive:
            while waiting and alive < block.concurrency:
                request = waiting.pop(0)
                running[request.request_id] = _Running(engine.add(request)[0], self.clock())
                alive += 1
            deltas = engine.step()
            now = self.clock()
            for delta in deltas:
                one = running[delta.request_id]
                if delta.token_ids:
                    one.first, one.last, ended = one.first or now, now, now
                alive -= delta.finish_reason is not None
        by_request: dict[str, list[StepRecord]] = defaultdict(list)
        for record in self.records:
            by_request[record.request].append(record)
        samples = [_sample(one, by_request[name]) for name, one in running.items()]
        if saved is not None:
            saved = (self._saved_s() or 0.0) - saved
        return samples, BlockTimes(ended - began, sum(s.tokens for s in samples), _rounds(self.records), saved)

    def _saved_s(self) -> float | None:
        """What the controller has saved so far, where it chooses for this arm."""
        auto = self.engine.drafters.auto
        return None if auto is None or self.settings.draft_length is not None else auto.controller.ledger.saved_s

    def _request(self, block: Block, index: int) -> Request:
        prompt = block.prompts[index]
        return Request(
            f"bench-{id(self):x}-{next(self._ids)}",
            tuple(chat_ids(self.llm, prompt)),
            params_of(prompt, block.temperature, self.max_tokens),
            self.settings,
            tenant(block.run_keys()[index], block.pool),
        )


@dataclass(frozen=True, slots=True)
class TransformersLoad:
    """Transformers' own `generate` over the same weights, greedy, one prompt at a time."""

    llm: LLM
    reference: Reference
    max_tokens: int

    def __call__(self, block: Block) -> tuple[list[Sample], BlockTimes]:
        assert (block.concurrency, block.temperature) == (1, 0.0), f"{block} is no greedy single stream"
        samples = [self._answer(chat_ids(self.llm, prompt)) for prompt in block.prompts]
        return samples, BlockTimes(sum(s.first_s + s.decode_s for s in samples), sum(s.tokens for s in samples))

    def _answer(self, ids: Sequence[int]) -> Sample:
        made = self.reference.generate(ids, self.max_tokens)
        return Sample(
            prompt_tokens=len(ids),
            token_ids=made.token_ids,
            finish_reason="stop" if made.token_ids[-1] in self.llm.checkpoint.eos_token_ids else "length",
            first_s=made.times_s[0],
            decode_s=made.times_s[-1] - made.times_s[0],
        )


def _sample(one: _Running, records: Sequence[StepRecord]) -> Sample:
    done = completion(one.choice)
    if done.error is not None:
        raise RequestFailed(done.error)
    stats, rounds = done.stats, [r for r in records if r.kind != "prefill"]
    return Sample(
        prompt_tokens=len(one.choice.request.prompt),
        token_ids=tuple(done.token_ids),
        finish_reason=done.finish_reason,
        first_s=one.first - one.began,
        decode_s=one.last - one.first,
        rounds=stats.rounds,
        draft_rounds=stats.draft_rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        emitted=stats.emitted,
        emitted_in_draft_rounds=stats.emitted_in_draft_rounds,
        target_s=sum(r.verify_s for r in rounds),
        draft_s=sum(r.draft_s for r in rounds),
        other_s=sum(r.other_s for r in rounds),
        lengths=tuple(r.proposed for r in rounds),
        kept=tuple(r.accepted for r in rounds),
    )


def _rounds(records: Sequence[StepRecord]) -> tuple[Rounds, ...]:
    """Rounds in which everything decoded, by shape."""
    by_round: dict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        by_round[record.round].append(record)
    sums: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0] * 5)
    for own in by_round.values():
        if any(r.kind == "prefill" for r in own):
            continue
        shape = (len(own), own[0].rows, max(r.proposed for r in own))
        context = sum(r.context for r in own) / len(own)
        for i, value in enumerate((1.0, context, own[0].verify_s, own[0].draft_s, own[0].other_s)):
            sums[shape][i] += value
    return tuple(Rounds(*shape, int(n), c / n, *seconds) for shape, (n, c, *seconds) in sorted(sums.items()))
