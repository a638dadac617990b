"""`layer-skip`: its contract, the target's cache before and after it, and the text it must not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from drafter_toys import Target, table_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_drafter import VOCAB, ModelLoop
from tiny_decoders import decoder_of
from tiny_models import tiny_model
from toy import Lab, request

from paceline.core.proposal import Dense, OneHot, Proposal
from paceline.decode.cache import KVCache, Transaction
from paceline.decode.draft.auto import AutoDrafter, Candidate
from paceline.decode.draft.base import Drafter, SequenceView, SharesTarget
from paceline.decode.draft.cut import cut
from paceline.decode.draft.layer_skip import EarlyExit, LayerSkipDrafter
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import Ring, Span, build_inputs
from paceline.decode.verify.prefix import PrefixState
from paceline.errors import InvalidParameter
from paceline.plan.control.cost import StepTimes

LAYERS = 4


@cache
def target(kind: str = "llama", dtype: torch.dtype = torch.float32) -> LlamaDecoder:
    """Four layers of which the last two say little, so that the first ones are often right."""
    model = tiny_model(kind, 5, num_hidden_layers=LAYERS)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
            if kind == "gemma3_text":  # norms behind both parts undo the scale; they multiply by 1 + weight
                layer.post_attention_layernorm.weight.fill_(-0.9)
                layer.post_feedforward_layernorm.weight.fill_(-0.9)
    return decoder_of(model.to(dtype))


def drafter(layers: int = 2, model: LlamaDecoder | None = None) -> LayerSkipDrafter:
    return LayerSkipDrafter(EarlyExit(model or target(), layers), name="layer-skip", slots=4)


class SharedLoop(ModelLoop):
    """Brings the cache a real engine would bring: all but the last committed token of each sequence."""

    def __init__(self, drafter: LayerSkipDrafter, target: Target) -> None:
        super().__init__(drafter, target)
        self.model = drafter.exit.target
        self.cache = self.model.new_cache(4, 128)
        drafter.share_target(self.model, self.cache)

    def begin(self, key: int, prompt: list[int], tenant: str = "") -> SequenceView:
        view = super().begin(key, prompt, tenant)
        view.slot = self.cache.allocate(128)
        self._fill(view)
        return view

    def round(self, keys: list[int], budget: int, asked: bool = True) -> list[Proposal]:
        before = snapshot([layer.data for layer in self.cache.storage], [self.cache.committed(s) for s in range(4)])
        proposals = super().round(keys, budget, asked)
        after = snapshot([layer.data for layer in self.cache.storage], [self.cache.committed(s) for s in range(4)])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "committed rows changed"
        self.cache.check([v.slot for v in self.views.values() if v.slot is not None])
        for key in keys:
            self._fill(self.views[key])
        return proposals

    def end(self, key: int) -> None:
        slot = self.views[key].slot
        super().end(key)
        assert slot is not None
        self.cache.release(slot)

    def check_cache(self, key: int) -> None: ...

    def _fill(self, view: SequenceView) -> None:
        assert view.slot is not None
        start = self.cache.committed(view.slot)
        missing = view.tokens[start:-1]
        if not missing:
            return
        with self.cache.transaction() as transaction:
            transaction.reserve(view.slot, len(missing))
            step = build_inputs(
                [Span(view.slot, start, missing)], self.cache.capacity, self.model.geometry, self.model.row_policy
            )
            self.model.forward(step, self.cache)
            transaction.commit(view.slot, range(len(missing)))


def snapshot(storage: list[torch.Tensor], committed: list[int]) -> list[torch.Tensor]:
    return [layer[:, slot, :, :held].clone() for layer in storage for slot, held in enumerate(committed)]


@cache
def _two_layers() -> Any:
    """The first two layers with the final norm and the head: a whole model of its own."""
    model = tiny_model("llama", 5, num_hidden_layers=LAYERS)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


def own_words(prefix: list[int]) -> int:
    """What the first two layers say, by Transformers and without any cache."""
    with torch.inference_mode():
        return int(_two_layers()(torch.tensor([prefix]), use_cache=False).logits[0, -1].argmax())


def test_is_a_drafter() -> None:
    made = drafter()
    assert isinstance(made, Drafter) and isinstance(made, SharesTarget) and made.needs.shares_target
    assert not made.needs.own_kv, "it has no cache of its own"
    loop = SharedLoop(made, own_words)
    loop.begin(7, [1, 2])
    with pytest.raises(AssertionError, match="7"):
        made.check_idle()
    loop.end(7)
    made.check_idle()


@pytest.mark.parametrize("layers", [0, LAYERS, -1])
def test_at_least_one_layer_drafts_and_one_is_skipped(layers: int) -> None:
    with pytest.raises(InvalidParameter, match=r"1 to 3.*layer-skip:N"):
        EarlyExit(target(), layers)
    assert EarlyExit(target()).layers == 1, "a quarter where nothing is said"


events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=14)


@settings(max_examples=12, deadline=None)
@given(
    table=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=9),
    texts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=4, max_size=4),
    what=events,
)
def test_any_interleaving_of_sequences(
    table: list[int], texts: list[list[int]], what: list[tuple[int, int, int]]
) -> None:
    """The contract; committed rows keep their bits; each first draft is what two layers alone say."""
    made = drafter()
    loop = SharedLoop(made, table_target(table))
    for kind, key, budget in what:
        if kind == 0 and key in loop.views:
            loop.end(key)
        elif kind == 0:
            loop.begin(key, texts[key])
        elif loop.views:
            keys = sorted(loop.views)[key % len(loop.views) :]
            before = [list(loop.views[k].tokens) for k in keys]
            for text, proposal in zip(before, loop.round(keys, budget, asked=kind == 1), strict=True):
                assert len(proposal) == (budget if kind == 1 else 0)
                assert not proposal.tokens or proposal.tokens[0] == own_words(text)
    for key in sorted(loop.views):
        loop.end(key)
    made.check_idle()


@pytest.mark.parametrize("index", range(5))
def test_rejection_at_every_index(index: int) -> None:
    loop = SharedLoop(drafter(), own_words)
    view = loop.begin(0, [11, 12, 13])
    loop.round([0], 3)
    assert loop.accepted == 3
    parting = len(view.tokens) + index
    loop.target = lambda text: (own_words(text) + 1) % VOCAB if len(text) == parting else own_words(text)
    loop.round([0], 5)
    assert len(view.tokens) == parting + 1
    accepted = loop.accepted
    loop.round([0], 4)
    assert loop.accepted == accepted + 4
    loop.end(0)
    loop.drafter.check_idle()


def commits(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the drafted rows are taken for committed ones when the drafting transaction is left."""
    if not fault:
        return
    leave = Transaction.__exit__

    def left(self: Transaction, *problem: Any) -> None:
        for slot, rows in self._reserved.items():
            self._cache._committed[slot] += rows
        leave(self, *problem)

    monkeypatch.setattr(Transaction, "__exit__", left)


ASKS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"min_tokens": 6}, {"n": 2}]


def compare(
    lab: Lab, model: LlamaDecoder, temperature: float, name: str = "layer-skip", logprobs: bool = True
) -> None:
    """Texts of a mixed batch against plain decoding, one request at a time."""
    asks = [
        request(
            [(11 * i + j) % VOCAB for j in range(2 + 3 * i)],
            id=str(i),
            draft=name,
            length=[1, 3, 5, 7, 4][i],
            temperature=temperature,
            seed=i,
            max_tokens=30,
            logprobs=1,
            **more,
        )
        for i, more in enumerate(ASKS)
    ]
    made: Drafter = drafter(model=model)
    if name == "auto":
        made = AutoDrafter([Candidate(made, StepTimes((1, 101), (0.1, 0.6)))])
    results = lab.run(lab.engine(model, {name: made}, eos=[2], max_batch=6, prefill_chunk=8), asks, [0, 2, 0, 3, 1])
    for r in asks:
        plain = lab.run(lab.engine(model, eos=[2], prefill_chunk=8), [request(r.prompt, draft="none", params=r.params)])
        assert [ran.tokens for ran in results[r.request_id]] == [ran.tokens for ran in plain["r"]]
        same = [ran.logprobs for ran in results[r.request_id]] == [ran.logprobs for ran in plain["r"]]
        assert same or not logprobs
    made.check_idle()
    drafted = [r for r in lab.records if r.kind == "verify"]
    accepted, proposed = sum(r.accepted for r in drafted), sum(r.proposed for r in drafted)
    assert 20 < accepted < proposed, "everything or nothing was accepted"
    assert all(r.confidence and all(0 < c <= 1 for c in r.confidence) for r in drafted)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_text_is_that_of_plain_decoding(lab: Lab, kind: str, dtype: torch.dtype, temperature: float) -> None:
    """Tokens and their log-probabilities, bit for bit: the verify pass does not see what drafting wrote."""
    compare(lab, target(kind, dtype), temperature)


def test_drafts_wrap_around_a_sliding_window(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 27 rows and a window of 16: drafting pushes out what no later query looks at, and nothing else."""
    monkeypatch.setattr(Ring, "holding", lambda window: Ring(window, window + 11))
    target.cache_clear()
    compare(lab, target("gemma3_text"), 0.0, logprobs=False)
    target.cache_clear()


def test_in_little_memory(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes taken over, sequences that yield and come back in other slots: the drafter finds its rows again."""
    monkeypatch.setattr(KVCache, "block", 32)
    common, made = list(range(40, 60)), drafter()
    asks = [
        request([*common, i, 2 * i + 1], id=str(i), draft="layer-skip", length=3, max_tokens=60) for i in range(6)
    ]
    budget = 7 * target().new_cache(1, 32).cost(32)
    engine = lab.engine(target(), {"layer-skip": made}, max_batch=4, max_context=512, cache_bytes=budget)
    results = lab.run(engine, asks, [0, 0, 1, 1, 2, 3])
    assert sum(ran.sequence.stats.preemptions for (ran,) in results.values()) > 0
    for r in asks:
        plain = lab.one(lab.engine(target()), request(r.prompt, draft="none", params=r.params))
        assert results[r.request_id][0].tokens == plain.tokens
    engine.clear_prefix_cache()
    made.check_idle()


def test_under_auto_as_well(lab: Lab) -> None:
    compare(lab, target(), 0.0, "auto")


def test_seen_red_when_drafted_rows_are_kept(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    commits(True, monkeypatch)
    with pytest.raises(AssertionError):
        compare(lab, target(), 0.0)
    lab.engines.clear()


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])
def test_a_row_that_is_not_finite_leaves_nothing_behind(lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """The first layers fail on a draft, and the verify pass is too short to write over it. The fault: no erasing."""
    forward: Callable[..., Any] = LlamaDecoder.forward
    spoilt = 0

    @torch.inference_mode()
    def spoil(self: LlamaDecoder, step: Any, cache: Any, taps: Any = (), layers: int | None = None) -> Any:
        nonlocal spoilt
        result = forward(self, step, cache, taps, layers)
        if layers is not None and int(step.positions[0]) % 5 == 0:
            spoilt += 1
            cache.storage[0].data[:, int(step.cache_slots[0]), :, int(step.cache_positions[0])] = float("nan")
            result.logits[0] = float("nan")
        return result

    made = drafter()
    propose = made.propose
    monkeypatch.setattr(made, "propose", lambda views, budgets: [cut(p, 1) for p in propose(views, budgets)])
    asked = request([5, 6, 7], draft="layer-skip", length=6, max_tokens=24)
    plain = lab.one(lab.engine(target()), request([5, 6, 7], draft="none", params=asked.params))
    monkeypatch.setattr(LlamaDecoder, "forward", spoil)
    if fault:
        monkeypatch.setattr(KVCache, "erase", lambda self, slot, first=0: None)
    ran = lab.one(lab.engine(target(), {"layer-skip": made}), asked)
    assert spoilt > (0 if fault else 3)
    lab.judge(fault, lambda: assert_same(ran.tokens, plain.tokens))


def assert_same(given: list[int], expected: list[int]) -> None:
    assert given == expected


def test_proposals_carry_what_they_were_drawn_from() -> None:
    loop = SharedLoop(drafter(), own_words)
    view = loop.begin(0, [4, 5, 6])
    (greedy,) = loop.drafter.propose([view], [3])
    assert greedy.distribution == OneHot() and greedy.confidence is not None
    view.params = request([4], temperature=0.9, top_k=7).params
    view.prefix = PrefixState(view.tokens, view.params, VOCAB, frozenset())
    view.verify = "rejection"
    (sampled,) = loop.drafter.propose([view], [3])
    assert isinstance(sampled.distribution, Dense)
    probs = sampled.distribution.probs
    assert probs.shape == (3, VOCAB) and ((probs > 0).sum(1) == 7).all()
    loop.end(0)
