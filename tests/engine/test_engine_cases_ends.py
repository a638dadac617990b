"""Faults seen in public engines: where an answer ends, and what is counted. Each is seen red with its fault in.

Scripted pair: the first token of the script comes from prefill, the rest from blocks; so "block index i" is
output index 1 + i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from oracle import Plain, plain_decode
from toy import FAULTS, Lab, Ran, Scripted, ToyModel, check_all_free, hashed, request, scripted

from paceline.core.output import Delta
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.engine import Engine

WIDTH, EOS = 32, 31


def reading(script: Sequence[int]) -> Callable[[SequenceView, int], list[int]]:
    """Drafts the script itself, as far as the budget goes."""
    return lambda view, budget: list(script[len(view.tokens) - view.prompt_len :][:budget])


def plainly(script: Sequence[int], params: SamplingParams, **options: Any) -> Plain:
    return plain_decode(scripted(script, WIDTH), [0], params, vocab_size=WIDTH, **options)


def same(ran: Ran, plain: Plain) -> None:
    assert (ran.tokens, ran.reason) == (plain.tokens, plain.reason)


class BlockStop(Engine):
    """SD-01's fault: the end is looked for at the last token of a block alone."""

    def _emit(self, sequence: Any, outcome: Any) -> Delta:
        left = len(outcome.verdict.tokens(outcome.proposal))
        push = type(sequence.stop).push

        def lazy(token: int) -> str:
            nonlocal left
            left -= 1
            ends, sequence.stop._ends = sequence.stop._ends, (sequence.stop._ends if left == 0 else frozenset())
            text = push(sequence.stop, token)
            sequence.stop._ends = ends
            return text

        sequence.stop.push = lazy
        return super()._emit(sequence, outcome)


# The bonus token (index 5) is the last of its block: there the fault cannot show.
@pytest.mark.parametrize(("index", "fault"), [(i, f) for i in range(6) for f in (False, True) if not (f and i == 5)])
@pytest.mark.parametrize("end", ["eos", "second eos", "stop id"])
def test_sd_01_end_token_anywhere_in_a_block(lab: Lab, index: int, end: str, fault: bool) -> None:
    script = [1, *range(2, 2 + index), EOS, *range(10, 20)]
    options: dict[str, Any] = {"stop_token_ids": (EOS,)} if end == "stop id" else {}
    eos = {"eos": {EOS}, "second eos": {30, EOS}, "stop id": set()}[end]
    ask = request([0], length=5, max_tokens=50, **options)

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH), reading(script), eos=eos, kind=BlockStop if fault else Engine
        )
        ran = lab.one(engine, ask)
        assert ran.tokens == script[: index + 2] and ran.reason == "stop"
        same(ran, plainly(script, ask.params, eos=eos))
        assert not {t for d in ran.deltas for t in d.token_ids} & set(range(10, 20)), "streamed past the end"
        assert ran.sequence.stats.emitted == index + 1, "billed past the end"
        assert sum(r.emitted for r in lab.records) == index + 2

    lab.judge(fault, check)


class TextOnlyStop(Engine):
    """SD-02's fault: the text is cut, ids and logprobs of the whole block stay."""

    def _emit(self, sequence: Any, outcome: Any) -> Delta:
        delta = super()._emit(sequence, outcome)
        rest = outcome.verdict.tokens(outcome.proposal)[len(delta.token_ids) :]
        sequence.view.tokens.extend(rest)
        more = (delta.logprobs[0],) * len(rest) if delta.logprobs else ()
        sequence.logprobs.extend(more)
        return replace(
            delta,
            token_ids=(*delta.token_ids, *rest),
            accepted=(*delta.accepted, *([True] * len(rest))),
            logprobs=(*delta.logprobs, *more),
        )


@FAULTS
def test_sd_02_stop_string_inside_a_block_cuts_everything(lab: Lab, fault: bool) -> None:
    pieces = {1: "hello ", 2: "EN", 3: "D!", 4: "more", 5: "text"}
    script = [6, 1, 2, 3, 4, 5, 4, 5]
    ask = request([0], length=6, max_tokens=50, stop=("END!",), logprobs=2)

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH),
            reading(script),
            pieces=pieces,
            kind=TextOnlyStop if fault else Engine,
        )
        ran = lab.one(engine, ask)
        plain = plainly(script, ask.params, pieces=pieces)
        same(ran, plain)
        assert ran.text == plain.text == "<6>hello "
        assert ran.tokens == [6, 1, 2, 3] and len(ran.logprobs) == 4
        assert ran.sequence.stats.emitted == 3
        assert lab.records[-1].proposed == 6 and lab.records[-1].emitted == 3, "not one block"

    lab.judge(fault, check)


class ForgetfulStop(Engine):
    """SD-03's fault: what the last step held back as a possible stop is not looked at again."""

    def _emit(self, sequence: Any, outcome: Any) -> Delta:
        sequence.stop._pending = ""
        return super()._emit(sequence, outcome)


@FAULTS
@pytest.mark.parametrize("broken_at", [1, 2, 3, 5])
def test_sd_03_two_token_stop_across_steps_of_ragged_rows(lab: Lab, broken_at: int, fault: bool) -> None:
    """Row A drafts four tokens a step, row B none; s1 ends a step of A where `broken_at` says so."""
    pieces = {1: "s1", 2: "s2", 3: "x", 4: "y"}
    script = [3, 2, 4, 2, 3, 1, 2, 4, 4, 4]  # s2 alone must not stop

    def four(view: SequenceView, budget: int) -> list[int]:
        said = len(view.tokens) - view.prompt_len
        return list(script[said : 5 if said <= 5 else None])[:budget] if said >= broken_at else []

    asks = [
        request([0], id="a", length=4, max_tokens=30, stop=("s1s2",)),
        request([0], id="b", draft="none", max_tokens=30, stop=("s1s2",)),
    ]

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH), four, pieces=pieces, kind=ForgetfulStop if fault else Engine
        )
        for ask, (ran,) in zip(asks, lab.run(engine, asks, [0, 1]).values(), strict=True):
            plain = plainly(script, ask.params, pieces=pieces)
            same(ran, plain)
            assert ran.tokens == [3, 2, 4, 2, 3, 1, 2] and ran.text == plain.text == "xs2ys2x"

    lab.judge(fault, check)


class CapFirst(Engine):
    """SD-04's fault: a block that crosses the cap is cut there before a stop is looked for."""

    def _emit(self, sequence: Any, outcome: Any) -> Delta:
        sequence.stop._ends, ends = frozenset(), sequence.stop._ends
        if len(outcome.verdict.tokens(outcome.proposal)) < sequence.room or outcome.prefill:
            sequence.stop._ends = ends
        return super()._emit(sequence, outcome)


# With the stop behind the cap the fault cannot show.
@pytest.mark.parametrize(
    ("at", "reason", "count", "fault"),
    [(3, "stop", 3, False), (3, "stop", 3, True), (6, "length", 5, False), (5, "stop", 5, False), (5, "stop", 5, True)],
)
def test_sd_04_stop_before_the_cap_in_one_block(lab: Lab, at: int, reason: str, count: int, fault: bool) -> None:
    script = [t if t != at else EOS for t in range(1, 10)]
    ask = request([0], length=8, max_tokens=5)

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH), reading(script), eos=[EOS], kind=CapFirst if fault else Engine
        )
        ran = lab.one(engine, ask)
        assert (len(ran.tokens), ran.reason) == (count, reason)
        same(ran, plainly(script, ask.params, eos=[EOS]))

    lab.judge(fault, check)


class KeepsFinished(Engine):
    """SD-05's fault: a sequence that prefill finished stays in the drafter's books."""

    def _retire(self) -> None:
        for sequence in self._running:
            drafter = self._drafter(sequence)
            if sequence.stop.finish_reason is not None and sequence.stats.rounds == 0:
                drafter.end = lambda view: None  # type: ignore[union-attr, method-assign]
        super()._retire()


@FAULTS
@pytest.mark.parametrize("arrivals", [[0, 0, 0, 0], [3, 4, 0, 0]], ids=["together", "short ones later"])
def test_sd_05_short_requests_among_long_ones(lab: Lab, arrivals: list[int], fault: bool) -> None:
    target = hashed(WIDTH, seed=3)
    asks = [request([i], id=str(i), length=4, max_tokens=n) for i, n in enumerate([1, 2, 64, 64])]
    truths = [plain_decode(target, r.prompt, r.params, vocab_size=WIDTH) for r in asks]

    def drafts(view: SequenceView, budget: int) -> list[int]:
        return truths[view.tokens[0]].tokens[len(view.tokens) - 1 :][:budget]

    def check() -> None:
        drafter = Scripted(drafts)
        engine = lab.engine(ToyModel(target, WIDTH), drafter, kind=KeepsFinished if fault else Engine)
        results = lab.run(engine, asks, arrivals)
        for ask, truth in zip(asks, truths, strict=True):
            (ran,) = results[ask.request_id]
            assert ran.sequence.slot is None
            same(ran, truth)
        assert [len(results[r.request_id][0].tokens) for r in asks] == [1, 2, 64, 64]
        assert not drafter.held
        check_all_free(engine)

    lab.judge(fault, check)


class BelievesDrafts(Engine):
    """SD-07's fault: the sequence is finished as soon as the drafter says end-of-text."""

    def _propose(self, batch: Any) -> Any:
        proposals = super()._propose(batch)
        for sequence, proposal in zip(batch, proposals, strict=True):
            if EOS in proposal.tokens:
                sequence.stop.finish_reason = "stop"
        return proposals


@FAULTS
@pytest.mark.parametrize("first", [[], [4]], ids=["end first", "a, end"])
def test_sd_07_drafted_end_the_target_does_not_take(lab: Lab, first: list[int], fault: bool) -> None:
    script = [3, 4, 5, 6, 7, 8, 9, EOS]

    def drafts(view: SequenceView, budget: int) -> list[int]:
        said = len(view.tokens) - view.prompt_len
        return [*first, EOS][:budget] if said == 1 else script[said : said + budget]

    ask = request([0], length=4, max_tokens=50)

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH), drafts, eos=[EOS], kind=BelievesDrafts if fault else Engine
        )
        ran = lab.one(engine, ask)
        same(ran, plainly(script, ask.params, eos=[EOS]))
        assert ran.tokens == script
        assert ran.sequence.stats.accepted > len(first), "later drafts work"

    lab.judge(fault, check, match="after the end")


class CountsMatches(Engine):
    """SD-30's fault: every match counts, emitted or not."""

    def _count(self, sequence: Any, outcome: Any) -> None:
        emitted, outcome.emitted = outcome.emitted, len(outcome.verdict.path) + 1
        accepted, outcome.accepted = outcome.accepted, len(outcome.verdict.path)
        super()._count(sequence, outcome)
        outcome.emitted, outcome.accepted = emitted, accepted


@FAULTS
def test_sd_30_counters_count_what_was_emitted(lab: Lab, fault: bool) -> None:
    script = [9, 1, 2, EOS, 4, 5, 6]

    def check() -> None:
        engine = lab.engine(
            ToyModel(scripted(script, WIDTH), WIDTH),
            reading(script),
            eos=[EOS],
            kind=CountsMatches if fault else Engine,
        )
        stats = lab.one(engine, request([0], length=5, max_tokens=50)).sequence.stats
        assert (stats.drafted, stats.accepted, stats.emitted, stats.rounds) == (5, 3, 3, 1)
        assert stats.acceptance_length == stats.tokens_per_round == 3

    lab.judge(fault, check)


def test_sd_30_no_drafts_no_division(lab: Lab) -> None:
    """Before any traffic, without drafts, at a stop string, with ragged neighbours: rates are sane or absent."""
    engine = lab.engine(ToyModel(hashed(WIDTH), WIDTH), lambda v, b: [1] * (b if v.tokens[0] else 0), pieces={})
    asks = [
        request([0], id="silent", max_tokens=6),
        request([1], id="wrong", length=5, max_tokens=6),
        request([2], id="stop", length=3, max_tokens=20, stop=("1",)),
        request([3], id="none", draft="none", max_tokens=1),
    ]
    stats = engine.add(request([0], id="early"))[0].stats
    assert stats.acceptance_length is None and stats.tokens_per_round is None
    engine.cancel("early")
    for name, (ran,) in lab.run(engine, asks).items():
        stats = ran.sequence.stats
        assert 0 <= stats.accepted <= stats.drafted
        if name == "silent":
            assert stats.drafted == 0 and stats.acceptance_length is None and stats.tokens_per_round == 1
        if name == "none":
            assert stats.rounds == 0 and stats.tokens_per_round is None
        for value in (stats.acceptance_length, stats.tokens_per_round):
            assert value is None or (math.isfinite(value) and value >= 1)
