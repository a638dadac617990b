"""The engine: many sequences, one pass a round, drafts checked and committed, nothing else moved.

A round is `Engine.step`: schedule, choose lengths, propose, one pass over all spans, verdicts, commit of the
cache, drafters observe, emit, record. Requests arrive and leave between rounds. A sequence with n committed
tokens holds n - 1 of them in the cache: the last one is the first row of its next span.

Guarantees: under `greedy` and `coupled` a sequence's tokens do not depend on its drafter, its draft length or
the other sequences of the batch, wherever its logits do not (see `model/rows.py`). A failure of one sequence
ends that sequence alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from paceline.core.output import Delta
from paceline.core.proposal import Proposal
from paceline.core.records import StepRecord
from paceline.decode.cache import Transaction
from paceline.decode.draft.auto import AutoDrafter
from paceline.decode.draft.base import Drafter, KeepsPrefixes, SequenceView
from paceline.decode.draft.build import DrafterSet, check_needs, share_target
from paceline.decode.draft.cut import best_nodes
from paceline.decode.draft.forced import with_forced
from paceline.decode.judge import judge
from paceline.decode.model.base import ForwardResult, TargetModel
from paceline.decode.model.step import Span, StepInputs, build_inputs
from paceline.decode.outcome import (
    Outcome,
    RoundTimes,
    add_seconds,
    count_round,
    emit,
    score_prompt,
    settle,
    write_records,
)
from paceline.decode.queue import Queue
from paceline.decode.room import new_room
from paceline.decode.sequence import Phase, Request, Sequence, check_tree_size
from paceline.decode.stopping import StopChecker, TextPieces
from paceline.decode.verify.grammar import GrammarCompiler
from paceline.decode.verify.leniency import check_leniency
from paceline.decode.verify.noise import request_key
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.rules import get_rule
from paceline.errors import ContextOverflow, InvalidParameter, RequestFailed, RequestTooLarge, UsageError
from paceline.plan.control.lengths import Load

__all__ = ["Engine", "EngineOptions"]

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """max_batch       sequences decoded together
    max_context     tokens of prompt and output of one sequence at most
    prefill_chunk   prompt tokens of one sequence in one pass; a request's chunks depend on its prompt alone
    max_draft       draft tokens a round where the drafter chooses the length
    deterministic   cut products into tiles, so that rows are independent in passes of any size
    cache_bytes     memory of the cache, all sequences together; None is max_batch times max_context. Who finds no
                    room waits, or yields to those before it and is resumed later
    prefix_cache    keep what ended sequences committed, for requests of their tenant that begin likewise
    """

    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 512
    max_draft: int = 15
    deterministic: bool = False
    cache_bytes: int | None = None
    prefix_cache: bool = True


class Engine:
    """Decodes requests over one target model.

    vocab_size, eos_token_ids   of the target's tokenizer
    drafters                    those that requests may name, as a `DrafterSet` or plainly by name
    new_pieces                  a fresh incremental detokeniser; None decodes ids only
    grammars                    compiles the grammars of requests; None refuses them
    on_record                   receives a StepRecord for every sequence in every round
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        drafters: DrafterSet | Mapping[str, Drafter] | None = None,
        options: EngineOptions | None = None,
        new_pieces: Callable[[], TextPieces] | None = None,
        grammars: GrammarCompiler | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.options = model, options or EngineOptions()
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids
        if not isinstance(drafters, DrafterSet):
            drafters = DrafterSet(dict(drafters or {}), "none")
        self.drafters = drafters
        o = self.options
        self._room = new_room(model, o.max_batch, o.max_context, o.prefill_chunk, o.cache_bytes, o.prefix_cache)
        self.cache = self._room.cache
        check_needs(drafters.drafters, self.cache.layers, new_pieces is not None)
        share_target(drafters.drafters.values(), model, self.cache)
        self._new_pieces, self._on_record, self._clock = new_pieces, on_record, clock
        self._grammars = grammars
        self._queue = Queue(self._room, o.max_batch, o.max_draft, self._drafter)
        self._waiting, self._running = self._queue.waiting, self._queue.running
        self._keys, self._round, self._started = count(), 0, clock()
        self._settling = 0.0

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; its choices decode as sequences of their own. Raises UsageError where it cannot run."""
        self._check(request)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences = [self._new_sequence(request, choice, seed) for choice in range(request.params.n)]
        self._waiting.extend(sequences)
        return sequences

    def cancel(self, request_id: str) -> None:
        """End every choice of a request; what it held is free before the next round."""
        for sequence in [*self._waiting, *self._running]:
            sequence.cancelled |= sequence.request.request_id == request_id

    def clear_prefix_cache(self) -> None:
        """Forget what ended sequences left; with nothing running, all memory of the cache is then free."""
        self._room.clear()
        for drafter in self.drafters.drafters.values():
            if isinstance(drafter, KeepsPrefixes):
                drafter.clear_prefixes()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Choices that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Choices that wait for a slot."""
        return len(self._waiting)

    @property
    def preemptions(self) -> int:
        """How often a choice yielded its memory, ever."""
        return self._queue.preemptions

    @property
    def cache_usage(self) -> float:
        """Share of the cache's memory that sequences which run hold; prefixes yield and do not count."""
        return self._room.used_bytes / (self.cache.nbytes + self.cache.free_bytes)

    def check(self) -> None:
        """Raise AssertionError where cache or drafters hold something no sequence owns."""
        self.cache.check([s.slot for s in self._running if s.slot is not None] + self._room.held_slots)
        if not self._running:
            for drafter in self.drafters.drafters.values():
                drafter.check_idle()

    # -- the round -----------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One round over everything that runs; returns what became certain."""
        began = self._clock()
        deltas = self._drop_cancelled()
        batch = self._schedule()
        if not batch:
            return deltas
        proposals = self._propose(batch)
        drafted = self._clock()
        with self.cache.transaction() as transaction:
            spans = [self._span(s, p, transaction) for s, p in zip(batch, proposals, strict=True)]
            inputs = build_inputs(
                spans,
                self.cache.capacity,
                self.model.geometry,
                self.model.row_policy,
                self.options.deterministic,
            )
            passed = self._clock()
            result = self.model.forward(inputs, self.cache, self._taps(batch))
            verified = self._clock()
            outcomes = self._outcomes(batch, proposals, spans, result, inputs)
            news = [
                self._commit(s, o, spans[i], transaction)
                for i, (s, o) in enumerate(zip(batch, outcomes, strict=True))
            ]
        self._keep_hidden(batch, outcomes, spans, result, inputs)
        observing = self._clock()
        self._observe(batch, outcomes)
        observed = self._clock()
        deltas += [d for d in news if d is not None]
        self._retire()
        drafting = drafted - began + observed - observing + self._settling
        times = RoundTimes(began - self._settling, drafting, verified - passed, self._clock())
        add_seconds(batch, outcomes, times)
        self._settle(batch, outcomes, times)
        if self._on_record is not None:
            write_records(
                self._on_record,
                batch,
                outcomes,
                round_index=self._round,
                rows=inputs.tokens,
                time_s=times.ended - self._started,
                times=times,
            )
        self._round += 1
        return deltas

    def _settle(self, batch: Seq[Sequence], outcomes: Seq[Outcome], times: RoundTimes) -> None:
        """What this takes is the controllers' time; the next round bears it, since this one's books are closed."""
        if self.drafters.autos:
            settle(self.drafters.autos, batch, outcomes, times)
            self._settling = self._clock() - times.ended

    # -- schedule and propose ------------------------------------------------------------------------------

    def _schedule(self) -> list[Sequence]:
        self._queue.admit()
        self._queue.make_room()
        return list(self._running)

    def _propose(self, batch: Seq[Sequence]) -> list[Proposal]:
        """One proposal per sequence, empty for those in prefill and where no draft fits the room left."""
        decoding = [i for i, s in enumerate(batch) if s.phase is Phase.DECODE and not s.undrafted]
        proposals = [_NOTHING] * len(batch)
        groups = self._by_drafter([batch[i] for i in decoding])
        for drafter, members in sorted(groups, key=lambda group: isinstance(group[0], AutoDrafter)):
            if isinstance(drafter, AutoDrafter):
                self._tell_load(drafter, batch, [decoding[m] for m in members], proposals)
            asked = [(decoding[m], self._budget(batch[decoding[m]])) for m in members]
            asked = [(i, budget) for i, budget in asked if budget > 0]
            if not asked:
                continue
            made = drafter.propose([batch[i].view for i, _ in asked], [budget for _, budget in asked])
            for (i, budget), proposal in zip(asked, made, strict=True):
                deepest = max(proposal.depths(), default=0)
                assert deepest <= budget, f"{drafter.name} drafted {deepest} of at most {budget} tokens"
                size = batch[i].view.tree_size
                assert size is None or len(proposal) <= size, f"{drafter.name}: {len(proposal)} nodes of {size}"
                proposals[i] = best_nodes(proposal, self._free_rows(batch[i]) - 1)
                if (grammar := batch[i].prefix.grammar) is not None:
                    proposals[i] = with_forced(proposals[i], grammar, budget)
        return proposals

    def _tell_load(
        self, auto: AutoDrafter, batch: Seq[Sequence], own: Seq[int], proposals: Seq[Proposal]
    ) -> None:
        """What decodes beside the sequences whose lengths are to be chosen, after its drafts are known."""
        others = [i for i, s in enumerate(batch) if s.phase is Phase.DECODE and i not in own]
        rows = sum(1 + len(proposals[i]) for i in others)
        auto.load = Load(rows, float(len(others)))
        auto.others = [len(batch[i].tokens) for i in others]

    def _free_rows(self, sequence: Sequence) -> int:
        """Rows a pass may write for this sequence; a tree can have more nodes than the cache has room for."""
        assert sequence.slot is not None
        free = self.cache.granted(sequence.slot) - self.cache.committed(sequence.slot)
        free = min(free, self.cache.largest_write)
        return min(free, self.model.row_policy.tile) if self.options.deterministic else free

    def _budget(self, sequence: Sequence) -> int:
        """Draft tokens at most: the last token emitted needs no draft, so one less than the room left."""
        asked = sequence.request.draft.draft_length
        length = self.options.max_draft if asked is None else asked
        length = min(length, sequence.room - 1, self._free_rows(sequence) - 1)
        return min(length, self.model.row_policy.tile - 1) if self.options.deterministic else length

    def _span(self, sequence: Sequence, proposal: Proposal, transaction: Transaction) -> Span:
        slot = sequence.slot
        assert slot is not None
        start = self.cache.committed(slot)
        if sequence.phase is Phase.DECODE:
            tokens = [sequence.tokens[-1], *proposal.tokens]
            parents = None
            if not proposal.is_chain:
                parents = [-1, *(0 if p is None else p + 1 for p in proposal.parents)]
            transaction.reserve(slot, len(tokens))
            return Span(slot, start, tokens, parents, limit=sequence.limit)
        chunk = self._room.next_chunk(sequence, start)
        transaction.reserve(slot, len(chunk))
        last = start + len(chunk) == len(sequence.tokens)
        want: Literal["all", "last", "none"] = "last" if last else "none"
        if sequence.scores_prompt:
            want = "all"
        return Span(slot, start, chunk, want=want, prefill=True, limit=sequence.limit)

    # -- verdicts and commits ------------------------------------------------------------------------------

    def _outcomes(
        self,
        batch: Seq[Sequence],
        proposals: Seq[Proposal],
        spans: Seq[Span],
        result: ForwardResult,
        inputs: StepInputs,
    ) -> list[Outcome]:
        """Verdicts of the sequences at the end of their prompt or past it; those in its middle have none."""
        places = [
            (first + rows - 1, 1) if span.prefill and rows else (first, rows)
            for span, (first, rows) in zip(spans, inputs.logits_of, strict=True)
        ]
        judged = [
            i for i, s in enumerate(spans) if not s.prefill or s.start + len(s.tokens) == len(batch[i].tokens)
        ]
        verdicts = judge(
            [batch[i] for i in judged],
            [proposals[i] for i in judged],
            result.logits,
            [places[i] for i in judged],
            self.vocab_size,
        )
        outcomes = [
            Outcome(p, prefill=s.phase is Phase.PREFILL, context=len(s.tokens))
            for s, p in zip(batch, proposals, strict=True)
        ]
        for i, verdict in zip(judged, verdicts, strict=True):
            first, rows = places[i]
            outcomes[i].logits = result.logits[first : first + rows]
            if isinstance(verdict, RequestFailed):
                outcomes[i].failure = verdict
            else:
                outcomes[i].verdict = verdict
        for sequence, span, (first, rows) in zip(batch, spans, inputs.logits_of, strict=True):
            if span.prefill and sequence.scores_prompt:
                score_prompt(sequence, span.start, result.logits[first : first + rows], self.vocab_size)
        return outcomes

    def _commit(
        self, sequence: Sequence, outcome: Outcome, span: Span, transaction: Transaction
    ) -> Delta | None:
        """Move one sequence by its verdict: emit up to the end, keep the cache rows behind what was emitted."""
        assert sequence.slot is not None
        if outcome.failure is not None:
            transaction.commit(sequence.slot, ())
            return self._give_up(sequence, outcome)
        sequence.undrafted = False
        if outcome.verdict is None:
            transaction.commit(sequence.slot, range(len(span.tokens)))
            outcome.kept = range(len(span.tokens))
            if self.cache.committed(sequence.slot) == sequence.filled < len(sequence.tokens):
                sequence.phase = Phase.DECODE
            return None
        delta = self._emit(sequence, outcome)
        rows = [0, *(1 + node for node in outcome.verdict.path)][: outcome.emitted]
        outcome.kept = range(len(span.tokens)) if outcome.prefill else rows
        transaction.commit(sequence.slot, span.places(outcome.kept))
        sequence.phase = Phase.DECODE if sequence.stop.finish_reason is None else Phase.FINISHED
        return delta

    def _give_up(self, sequence: Sequence, outcome: Outcome) -> Delta | None:
        """Fail the sequence; but drafts may lead where plain decoding never goes, so first try without them."""
        assert sequence.slot is not None and outcome.failure is not None
        if len(outcome.proposal):
            self.cache.erase(sequence.slot, self.cache.committed(sequence.slot))
            sequence.undrafted = True
            self._count(sequence, outcome)
            return None
        self.cache.erase(sequence.slot)
        return self._fail(sequence, outcome.failure)

    def _emit(self, sequence: Sequence, outcome: Outcome) -> Delta:
        delta = emit(sequence, outcome, self.vocab_size)
        self._count(sequence, outcome)
        return delta

    def _count(self, sequence: Sequence, outcome: Outcome) -> None:
        count_round(sequence, outcome)

    # -- drafters and endings ------------------------------------------------------------------------

    def _drafter(self, sequence: Sequence) -> Drafter | None:
        settings, auto = sequence.request.draft, self.drafters.auto
        named = self.drafters.drafters.get(settings.drafter)
        chosen_for = settings.draft_length is None and named is not None and not isinstance(named, AutoDrafter)
        return auto if chosen_for and auto is not None else named

    def _by_drafter(self, batch: Seq[Sequence]) -> list[tuple[Drafter, list[int]]]:
        """The drafters in use and, for each, the places of its sequences in `batch`."""
        groups: dict[int, tuple[Drafter, list[int]]] = {}
        for i, sequence in enumerate(batch):
            if (drafter := self._drafter(sequence)) is not None:
                groups.setdefault(id(drafter), (drafter, []))[1].append(i)
        return list(groups.values())

    def _taps(self, batch: Seq[Sequence]) -> tuple[int, ...]:
        return tuple(sorted({layer for d, _ in self._by_drafter(batch) for layer in d.needs.hidden_layers}))

    def _keep_hidden(
        self,
        batch: Seq[Sequence],
        outcomes: Seq[Outcome],
        spans: Seq[Span],
        result: ForwardResult,
        inputs: StepInputs,
    ) -> None:
        for i, (sequence, outcome) in enumerate(zip(batch, outcomes, strict=True)):
            drafter = self._drafter(sequence)
            if drafter is None:
                continue
            first, rows = inputs.rows_of[i]
            for layer in drafter.needs.hidden_layers:
                kept = result.hidden[layer][first : first + rows][list(outcome.kept)]
                sequence.view.hidden[layer] = _append(sequence.view.hidden.get(layer), kept)

    def _observe(self, batch: Seq[Sequence], outcomes: Seq[Outcome]) -> None:
        """Tell each drafter what its sequences committed; a verdict cut short by the end of the text is None."""
        for drafter, members in self._by_drafter(batch):
            grown = [i for i in members if outcomes[i].emitted]
            if grown:
                drafter.observe([batch[i].view for i in grown], [outcomes[i].whole_verdict for i in grown])

    def _fail(self, sequence: Sequence, failure: RequestFailed) -> Delta:
        sequence.phase, sequence.error = Phase.FINISHED, str(failure)
        sequence.stop.finish_reason = "error"
        return self._last_words(sequence)

    def _last_words(self, sequence: Sequence) -> Delta:
        """The delta that ends a sequence from outside (failure, cancellation), with the text held back so far."""
        reason = sequence.stop.finish_reason
        text = sequence.stop.flush()
        sequence.stop.finish_reason = reason
        sequence.text += text
        return Delta(
            sequence.request.request_id,
            sequence.choice,
            text=text,
            finish_reason=reason,
            error=sequence.error,
        )

    def _drop_cancelled(self) -> list[Delta]:
        gone = [s for s in [*self._waiting, *self._running] if s.cancelled]
        deltas = []
        for sequence in gone:
            sequence.phase = Phase.FINISHED
            sequence.stop.finish_reason = "cancelled"
            deltas.append(self._last_words(sequence))
        if gone:
            self._waiting[:] = [s for s in self._waiting if not s.cancelled]
            self._retire()
        return deltas

    def _retire(self) -> None:
        for sequence in [s for s in self._running if s.phase is Phase.FINISHED]:
            self._running.remove(sequence)
            if (drafter := self._drafter(sequence)) is not None:
                drafter.end(sequence.view)
            self._room.leave(sequence, useful=sequence.error is None)
        if not self._running:
            self.check()

    # -- checks --------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise UsageError("the prompt is empty; give at least one token")
        wrong = [token for token in (min(request.prompt), max(request.prompt)) if not 0 <= token < self.vocab_size]
        if wrong:
            raise InvalidParameter("prompt token id", wrong[0], f"ids from 0 to {self.vocab_size - 1}")
        if len(request.prompt) >= self.options.max_context:
            raise ContextOverflow(
                f"the prompt has {len(request.prompt)} tokens; the context holds {self.options.max_context} "
                f"with at least one for the answer. Shorten the prompt or raise --max-context."
            )
        self._check_memory(request)
        if any(s.request.request_id == request.request_id for s in [*self._waiting, *self._running]):
            raise InvalidParameter("request_id", request.request_id, "an id that no unfinished request has")
        if any(isinstance(word, str) for word in request.params.bad_words):
            raise UsageError("the engine takes bad words as token ids; LLM turns text into them")
        if request.params.stop and self._new_pieces is None:
            raise UsageError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if request.params.grammar is not None and self._grammars is None:
            raise UsageError("a grammar needs a tokenizer, and this model has none; use allowed_token_ids")
        settings = request.draft
        get_rule(settings.verify)
        if settings.verify == "greedy" and not request.params.greedy:
            raise InvalidParameter("verify", "greedy", "any other rule where the temperature is above 0")
        check_leniency(settings.verify, settings.relaxed)
        if settings.drafter != "none" and settings.drafter not in self.drafters.drafters:
            known = ", ".join(["none", *self.drafters.drafters])
            raise InvalidParameter("drafter", settings.drafter, f"one of {known}")
        length = settings.draft_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise InvalidParameter("draft_length", settings.draft_length, "a whole number from 0, or auto")
        check_tree_size(settings, self.drafters.drafters.get(settings.drafter))

    def _check_memory(self, request: Request) -> None:
        """Refuse what could not be decoded even with the cache to itself."""
        most, asked = self._room.most_tokens, request.params.max_tokens
        needed = min(len(request.prompt) + (1 if asked is None else asked), self.options.max_context)
        if most is not None and needed > most:
            raise RequestTooLarge(
                f"the request needs a cache of {needed} tokens ({len(request.prompt)} of them prompt); the memory "
                f"given to it holds {most}. Shorten the prompt, ask for fewer tokens, or raise --max-memory."
            )

    def _new_sequence(self, request: Request, choice: int, seed: int) -> Sequence:
        params = request.params
        output = params.max_tokens if params.max_tokens is not None else self.options.max_context
        limit = min(len(request.prompt) + output, self.options.max_context)
        if self._room.most_tokens is not None:
            limit = min(limit, self._room.most_tokens)
        grammar = None
        if params.grammar is not None:
            assert self._grammars is not None
            grammar = self._grammars.start(params.grammar)
        prefix = PrefixState(request.prompt, params, self.vocab_size, self.eos_token_ids, grammar)
        noise = request_key(seed, choice)
        view = SequenceView(
            key=next(self._keys),
            tokens=list(request.prompt),
            prompt_len=len(request.prompt),
            params=params,
            noise_key=noise,
            tenant=request.tenant,
            prefix=prefix,
            limit=limit,
            tree_size=request.draft.tree_size,
            verify=request.draft.verify,
        )
        stop = StopChecker(params, self.eos_token_ids, limit - len(request.prompt), self._new_pieces)
        return Sequence(request, choice, view, prefix, stop, limit, noise)


def _append(kept: Tensor | None, rows: Tensor) -> Tensor:
    return rows.clone() if kept is None else torch.cat([kept, rows])
