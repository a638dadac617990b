"""Faults seen in public engines: cache, positions, context, drafters' own state. Each is seen red with its fault in.

After every round `Lab.run` checks that the cache holds exactly all committed tokens but the last, and every row
of the scripted target reads its prefix back from the cache.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import next_token, plain_decode
from scipy import stats
from toy import FAULTS, Lab, Scripted, ToyModel, check_all_free, check_books, collect, following, hashed, request

import paceline.decode.model.families as families_module
from paceline.core.proposal import Proposal
from paceline.decode.cache import KVCache, Transaction
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.registry import make_model_free
from paceline.decode.engine import Engine
from paceline.decode.model.step import Span
from paceline.errors import ContextOverflow, UnsupportedModel

WIDTH = 24
TARGET = hashed(WIDTH, seed=1)


def answers(asks: Sequence[Any], **options: Any) -> dict[tuple[int, ...], list[int]]:
    plains = [plain_decode(TARGET, r.prompt, r.params, **({"vocab_size": WIDTH} | options)) for r in asks]
    return {r.prompt: plain.tokens for r, plain in zip(asks, plains, strict=True)}


def knows(known: dict[tuple[int, ...], list[int]], plan: Sequence[Any]) -> Any:
    return following(lambda view: known[tuple(view.tokens[: view.prompt_len])], plan, WIDTH)


def toy_drafter(
    model: ToyModel | None = None, *, max_positions: int = 4096, slots: int = 8, **more: Any
) -> ModelDrafter:
    return ModelDrafter(
        model or ToyModel(TARGET, WIDTH, max_positions=max_positions),
        name="scripted",
        max_positions=max_positions,
        slots=slots,
        **more,
    )


class Watched(ModelDrafter):
    """Checks every proposal against the draft's logits without a cache, drawn with the target's noise."""

    def propose(self, views: Any, budgets: Any) -> list[Proposal]:
        made = super().propose(views, budgets)
        for view, proposal in zip(views, made, strict=True):
            prompt, output = view.tokens[: view.prompt_len], view.tokens[view.prompt_len :]
            for token in proposal.tokens:
                row = self.model.logits((*prompt, *output))
                own, _ = next_token(row, view.params, prompt, output, view.prefix.vocab_size, frozenset(), 0)
                assert token == own, "not what the draft model says"
                output.append(token)
        return made


# With one draft a round a draft model has nothing to roll back.
@pytest.mark.parametrize(
    ("length", "fault"),
    [(1, None), (1, "one row too many"), (4, None), (4, "one row too many"), (4, "draft not rolled back")],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sd_16_roll_back_when_any_candidate_is_rejected(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, length: int, temperature: float, fault: str | None
) -> None:
    if fault == "one row too many":
        commit = Transaction.commit

        def late(self: Transaction, slot: int, path: Sequence[int]) -> None:
            rows = self._reserved[slot]
            commit(self, slot, range(rows) if len(path) == rows - 1 and rows > 1 else path)

        monkeypatch.setattr(Transaction, "commit", late)
    if fault == "draft not rolled back":
        monkeypatch.setattr(KVCache, "truncate", lambda self, slot, tokens: None)
    asks = [request([i], id=str(i), length=length, max_tokens=64, temperature=temperature, seed=i) for i in range(3)]
    known = answers(asks)
    plan = [0] if length == 1 else [(0, 4), (1, 4), (2, 4), (3, 4)]

    def check() -> None:
        draft = Watched(
            ToyModel(hashed(WIDTH, seed=2), WIDTH), name="draft", max_positions=200, slots=8, prefill_chunk=3
        )
        engine = lab.engine(ToyModel(TARGET, WIDTH), {"scripted": Scripted(knows(known, plan)), "draft": draft})
        own = request([9], id="own", draft="draft", length=length, max_tokens=64, temperature=temperature, seed=9)
        results = lab.run(engine, [*asks, own])
        for r in asks:
            assert results[r.request_id][0].tokens == known[r.prompt]
        assert results["own"][0].tokens == answers([own])[9,]
        if length == 1:
            assert sum(r.accepted for r in lab.records if r.request != "own") == 0

    lab.judge(fault is not None, check)


@pytest.mark.parametrize("plan", [None, [0, 1, 2, 3, 4, 5]], ids=["target drafts", "right for k tokens"])
@FAULTS
def test_sd_17_positions_over_committed_tokens(lab: Lab, plan: list[int] | None, fault: bool) -> None:
    """The fault adds one position a round, however many tokens it committed."""

    class OneARound(Engine):
        def _span(self, sequence: Any, proposal: Any, transaction: Any) -> Span:
            span = super()._span(sequence, proposal, transaction)
            start = sequence.view.prompt_len + sequence.stats.rounds if not span.prefill else span.start
            return Span(span.slot, start, span.tokens, span.parents, span.want, span.prefill)

    ask = request([10], length=5, max_tokens=60)
    known = answers([ask])

    def check() -> None:
        model = ToyModel(TARGET, WIDTH)
        drafter = toy_drafter() if plan is None else Scripted(knows(known, plan))
        ran = lab.one(lab.engine(model, drafter, kind=OneARound if fault else Engine), ask)
        assert ran.tokens == known[10,]
        whole = (10, *ran.tokens)
        assert {whole[:n] for n in range(1, 61)} <= set(model.seen), "a committed position was never computed"
        assert all(TARGET(whole[:n]).argmax() == whole[n] for n in range(1, 61))
        if plan is None:
            stats = ran.sequence.stats
            assert stats.accepted == stats.drafted

    lab.judge(fault, check)


@FAULTS
@pytest.mark.parametrize("name", ["mamba", "rwkv", "jamba", "qwen3_next", "lfm2", "kimi_linear", "recurrent_gemma"])
def test_sd_19_recurrent_models_are_refused_by_name(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str, fault: bool
) -> None:
    """Their state cannot be rolled back; the fault is to take them for any decoder."""
    if fault:
        monkeypatch.setattr(families_module, "FAMILIES", {*families_module.FAMILIES, name})

    def check() -> None:
        said = ""
        try:
            families_module.check_family(SimpleNamespace(model_type=name), "the model")
        except UnsupportedModel as error:
            said = str(error)
        assert f"the model is a {name} model" in said and "cannot be rolled back" in said

    lab.judge(fault, check)


@pytest.mark.parametrize("drafts", ["scripted", "short context", "ngram"])
@FAULTS
def test_sd_20_drafts_stop_at_the_context(lab: Lab, drafts: str, fault: bool) -> None:
    """Context 64, as hard as a table of 64 rotations: prompts of 58 to 63 tokens end at 64 in all."""

    class Unbounded(Engine):
        def _budget(self, sequence: Any) -> int:
            return sequence.request.draft.draft_length

    target = hashed(WIDTH, seed=6, order=1) if drafts == "ngram" else TARGET  # the first soon repeats itself
    asks = []
    for n in (40, *range(58, 64)):
        text = [n % 5]
        while len(text) < n:
            text.append(int(target(tuple(text)).argmax()))
        asks.append(request(text, id=str(n), length=5, max_tokens=30))
    plains = [plain_decode(target, r.prompt, r.params, vocab_size=WIDTH, context=64) for r in asks]
    drafter: Any = {
        "scripted": Scripted(lambda view, budget: [1] * budget),
        "short context": ModelDrafter(
            ToyModel(TARGET, WIDTH, max_positions=48), name="d", max_positions=64 if fault else 48, slots=8
        ),
        "ngram": make_model_free("ngram"),
    }[drafts]

    def check() -> None:
        engine = lab.engine(
            ToyModel(target, WIDTH, max_positions=64),
            {"scripted": drafter},
            max_context=64,
            kind=Unbounded if fault else Engine,
        )
        for draft in ("scripted", "none"):
            with pytest.raises(ContextOverflow, match="64 tokens"):
                engine.add(request([1] * 64, draft=draft))
        results = lab.run(engine, asks)
        for r, plain in zip(asks, plains, strict=True):
            (ran,) = results[r.request_id]
            assert ran.tokens == plain.tokens and ran.reason == "length"
            assert len(r.prompt) + len(ran.tokens) == 64
        drafted = sum(ran.sequence.stats.drafted for (ran,) in results.values())
        assert drafted > 0
        if drafts == "short context":
            assert all(r.context + r.proposed <= 48 for r in lab.records if r.proposed), (
                "drafted past the draft's own context"
            )

    lab.judge(fault, check)


class Features:
    """A feature-level drafter on the scripted target: it consumes (hidden state t, token t + 1) one by one, and
    what it says depends on all it has consumed.
    """

    name = "scripted"
    needs = Needs(hidden_layers=(0, -1), own_kv=True)

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known, self.consumed = known, dict[int, list[tuple[float, ...]]]()
        self.said: list[tuple[int, ...]] = []

    def begin(self, view: SequenceView) -> None:
        self.consumed[view.key] = []

    def _consume(self, view: SequenceView) -> None:
        own = self.consumed[view.key]
        assert all(len(view.hidden[layer]) == len(view.tokens) - 1 for layer in self.needs.hidden_layers)
        for t in range(len(own), len(view.tokens) - 1):
            own.append((*view.hidden[0][t].tolist(), *view.hidden[-1][t].tolist(), view.tokens[t + 1]))

    def propose(self, views: Any, budgets: Any) -> list[Proposal]:
        made = []
        for view, budget in zip(views, budgets, strict=True):
            state = zlib.crc32(str(self.consumed[view.key]).encode())
            said = len(view.tokens) - view.prompt_len
            right = self.known[tuple(view.tokens[: view.prompt_len])][said : said + 3]
            tokens = [*right[: state % 4], state % WIDTH, state // WIDTH % WIDTH][:budget]
            self.said.append(tuple(tokens))
            made.append(Proposal.chain(tokens, self.name))
        return made

    def observe(self, views: Any, verdicts: Any) -> None:
        for view in views:
            self._consume(view)

    def end(self, view: SequenceView) -> None:
        del self.consumed[view.key]

    def check_idle(self) -> None:
        assert not self.consumed


@FAULTS
@pytest.mark.parametrize("kind", ["features", "own cache"])
def test_sd_22_chunked_prefill_leaves_the_drafter_as_one_chunk_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str, fault: bool
) -> None:
    prompt = [zlib.crc32(bytes([i % 256, i // 256])) % WIDTH for i in range(1000)]
    ask = request(prompt, length=5, max_tokens=16)
    known = answers([ask])

    class WrongEdge(Engine):
        """At the end of a chunk that is not the last, the drafter gets the hidden state of nothing."""

        def _keep_hidden(self, batch: Any, outcomes: Any, *rest: Any) -> None:
            super()._keep_hidden(batch, outcomes, *rest)
            for sequence, outcome in zip(batch, outcomes, strict=True):
                if outcome.verdict is None and 0 in sequence.view.hidden:
                    sequence.view.hidden[0][-1] = 0

    if fault and kind == "own cache":  # the next chunk begins one token late
        catch = ModelDrafter._pass

        def late(self: ModelDrafter, entries: Any) -> torch.Tensor:
            return catch(self, [(g, tokens[1:] if len(g.state.written) == 256 else tokens) for g, tokens in entries])

        monkeypatch.setattr(ModelDrafter, "_pass", late)

    def run(chunk: int) -> tuple[list[tuple[int, ...]], Any]:
        said: list[tuple[int, ...]] = []
        if kind == "features":
            drafter: Any = Features(known)
            said = drafter.said
        else:
            drafter = toy_drafter(ToyModel(hashed(WIDTH, seed=4), WIDTH), prefill_chunk=chunk)
            propose = drafter.propose
            drafter.propose = lambda views, budgets: _noted(said, propose(views, budgets))
        engine = lab.engine(
            ToyModel(TARGET, WIDTH),
            {"scripted": drafter},
            prefill_chunk=chunk,
            kind=WrongEdge if fault and chunk < 1000 else Engine,
        )
        return said, lab.one(engine, ask)

    def check() -> None:
        (whole_said, whole), (said, ran) = run(1000), run(256)
        assert ran.tokens == whole.tokens == known[tuple(prompt)]
        assert said == whole_said
        assert ran.sequence.stats.accepted == whole.sequence.stats.accepted
        assert kind == "own cache" or ran.sequence.stats.accepted > 2

    lab.judge(fault, check)


def _noted(said: list[tuple[int, ...]], made: list[Proposal]) -> list[Proposal]:
    said += [p.tokens for p in made]
    return made


def test_hidden_states_end_where_the_answer_ends(lab: Lab) -> None:
    """The end lies inside an accepted block: rows behind it are not handed to the drafter."""
    known = answers([request([1], max_tokens=30)])
    for end in range(3, 15):
        ask = request([1], length=5, max_tokens=30, stop_token_ids=(known[1,][end],))
        ran = lab.one(lab.engine(ToyModel(TARGET, WIDTH), {"scripted": Features(known)}), ask)
        assert ran.tokens == answers([ask])[1,] and ran.reason == "stop"


def test_the_cache_grows_under_sequences_that_run(lab: Lab) -> None:
    """A long prompt arrives while short answers are half written."""
    asks = [request([i], id=str(i), length=4, max_tokens=24) for i in range(3)]
    asks.append(request([5] * 600, id="long", length=4, max_tokens=8))
    known = answers(asks)
    held: list[int] = []

    class Watching(Engine):
        def _propose(self, batch: Any) -> Any:
            held.append(self.cache.nbytes // self.cache.cost(512))
            return super()._propose(batch)

    engine = lab.engine(ToyModel(TARGET, WIDTH), knows(known, [2, 1]), kind=Watching)
    results = lab.run(engine, asks, [0, 0, 1, 4])
    assert held[0] == 2 and max(held) == 3 + 2, "memory is taken as tokens need it"
    assert all(results[r.request_id][0].tokens == known[r.prompt] for r in asks)


class CancelsInAPass(ToyModel):
    """Ends requests of the engine while a pass runs."""

    def forward(self, *arguments: Any) -> Any:
        if self.plan and self.rng.random() < 0.3:
            self.engine.cancel(self.plan.pop())
        return super().forward(*arguments)


class Drops(Engine):
    """SD-24's fault: a cancelled request leaves the batch but not the drafter and the cache."""

    def _drop_cancelled(self) -> Any:
        gone = [s for s in self._running if s.cancelled]
        self._running = [s for s in self._running if not s.cancelled]
        for sequence in gone:
            sequence.stop.finish_reason = "cancelled"
        return [self._last_words(s) for s in gone] + super()._drop_cancelled()


@FAULTS
def test_sd_24_cancelling_at_any_moment(lab: Lab, fault: bool) -> None:
    """Eight requests, three cancelled between rounds, one in the middle of a pass; 25 times over."""
    asks = [request([i], id=str(i), length=4, max_tokens=10 + i, draft="ab"[i % 2]) for i in range(8)]
    known = answers(asks)

    def once(seed: int) -> None:
        rng = random.Random(seed)
        model = CancelsInAPass(TARGET, WIDTH)
        draft = toy_drafter()
        scripted = Scripted(knows(known, [3, 1, (4, 4)]))
        drafters = {"a": scripted, "b": draft}
        engine = lab.engine(model, drafters, max_batch=rng.choice([5, 8]), kind=Drops if fault else Engine)
        names = rng.sample([r.request_id for r in asks], 4)
        model.rng, model.engine, model.plan = rng, engine, names[:1]  # type: ignore[attr-defined]
        between = names[1:]
        choices = [choice for r in asks for choice in engine.add(r)]
        deltas: list[Any] = []
        while engine.has_work:
            if between and rng.random() < 0.4:
                engine.cancel(between.pop())
            marked = {s.request.request_id for s in choices if s.cancelled and s.stop.finish_reason is None}
            fresh = engine.step()
            assert marked <= {d.request_id for d in fresh if d.finish_reason == "cancelled"}
            assert not marked & {d.request_id for d in fresh if d.token_ids}, "decoded after it was cancelled"
            deltas += fresh
            check_books(engine)
        for r, choice in zip(asks, choices, strict=True):
            ran = collect(choice, deltas)
            if ran.reason == "cancelled":
                assert r.request_id in names and ran.tokens == known[r.prompt][: len(ran.tokens)]
            else:
                assert ran.tokens == known[r.prompt] and ran.reason == "length"
        check_all_free(engine)
        assert draft.cache.free_slots == 8 and not scripted.held

    def check() -> None:
        for seed in range(25):
            once(seed)
        reasons = {r.request for r in lab.records}
        assert len(reasons) == 8

    lab.judge(fault, check)


@FAULTS
@pytest.mark.parametrize(("target_width", "draft_width"), [(104, 100), (100, 104), (104, 92)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sd_26_vocabularies_padded_differently(
    lab: Lab, target_width: int, draft_width: int, temperature: float, fault: bool
) -> None:
    """98 real ids, large logits in the padding. The fault takes the target's width for its vocabulary.

    500 answers of two tokens: a false alarm in each of the two laws has a chance below 1e-4. The third pair: a
    draft that lacks ids the target has.
    """
    real = 98
    one = hashed(real, seed=8, scale=1.5, order=1)

    def padded(width: int, change: float) -> Any:
        other = hashed(width, seed=9, scale=change, order=1)

        def logits(prefix: tuple[int, ...]) -> np.ndarray:
            row = np.concatenate([one(prefix), np.full(max(width - real, 0), 9.0, dtype=np.float32)])[:width]
            return row + other(prefix)

        return logits

    def check() -> None:
        draft = toy_drafter(ToyModel(padded(draft_width, 0.3), draft_width), slots=64)
        engine = lab.engine(
            ToyModel(padded(target_width, 0.0), target_width),
            draft,
            vocab_size=target_width if fault else real,
            max_batch=64,
        )
        n = (50 if fault else 500) if temperature else 2
        ask = request([5], length=1, temperature=temperature, seed=1, n=n, max_tokens=3)
        tokens = np.array([ran.tokens for ran in lab.run(engine, [ask])["r"]])
        assert tokens.max() < real, "padding was emitted"
        assert draft_width < real or sum(r.accepted for r in lab.records) > (n // 4 if temperature else 0)
        if not temperature:
            plain = plain_decode(one, [5], ask.params, vocab_size=real)
            assert tokens.tolist() == [plain.tokens] * n
            return
        step = np.exp(np.stack([one((token,)) for token in range(real)]).astype(np.float64))
        step /= step.sum(1, keepdims=True)
        law = np.eye(real)[5]
        for position in range(2):
            law = law @ step
            common = law * n >= 5
            counts = np.bincount(tokens[:, position], minlength=real)
            seen = [*counts[common], counts[~common].sum()]
            expected = [*law[common] * n, law[~common].sum() * n]
            assert min(expected) >= 5 and stats.chisquare(seen, expected).pvalue > 1e-4

    lab.judge(fault, check)
