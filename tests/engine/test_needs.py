"""`needs` made real: a drafter that lives on the target's hidden states, through its contract and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from drafter_toys import Loop
from tiny_decoders import tiny_decoder
from tiny_models import tiny_model
from torch import Tensor
from toy import Lab, request

from paceline.core.proposal import Proposal
from paceline.decode.draft.base import Drafter, Needs, SequenceView
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import Span, build_inputs

LAYERS = (0, 1, -1)
VOCAB = 384


@cache
def module() -> Any:
    return tiny_model("llama", 3)


def recompute(tokens: Sequence[int]) -> dict[int, Tensor]:
    """Hidden states of every position by Transformers, without a cache."""
    with torch.inference_mode():
        out = module()(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        raw = list(out.hidden_states)  # embeddings, layer 0, ..., the last one after the final norm
        last = module().model.layers[-1](raw[-2], position_embeddings=_turns(raw[-2]), attention_mask=_causal(raw[-2]))
    return {0: raw[1][0], 1: (last[0] if isinstance(last, tuple) else last)[0], -1: raw[-1][0]}


def assert_same(given: Tensor, expected: Tensor) -> None:
    """Equal to rounding: another position's states differ by their own size."""
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _turns(x: Tensor) -> Any:
    return module().model.rotary_emb(x, torch.arange(x.shape[1])[None])


def _causal(x: Tensor) -> Tensor:
    n = x.shape[1]
    return torch.full((1, 1, n, n), float("-inf")).triu(1)


class FeatureDrafter:
    """Random small head: from the last hidden states and the last token, a chain; some of the tokens are better
    than chance, because the target's own head reads the same features.
    """

    name = "features"
    needs = Needs(hidden_layers=LAYERS)

    def __init__(self, target: LlamaDecoder, watch: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        width = target.embedding.shape[1]
        self.target, self.watch = target, watch
        self.mix = torch.randn(2 * width, width, generator=generator) * 0.02
        self.views: dict[int, SequenceView] = {}
        self.looked = 0

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self.views
        self.views[view.key] = view

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: SequenceView, budget: int) -> Proposal:
        state, token, tokens = view.hidden[-1][-1], view.tokens[-1], list[int]()
        for _ in range(budget):
            state = torch.cat([state, self.target.embedding[token]]) @ self.mix + state
            token = int(self.target.head(state[None])[0].argmax())
            tokens.append(token)
        return Proposal.chain(tokens, self.name) if tokens else Proposal()

    def observe(self, views: Sequence[SequenceView], verdicts: Any) -> None:
        for view in views if self.watch else ():
            expected = recompute(view.tokens[:-1])
            for layer in LAYERS:
                assert view.hidden[layer].shape[0] == len(view.tokens) - 1
                assert_same(view.hidden[layer], expected[layer])
            self.looked += 1

    def end(self, view: SequenceView) -> None:
        del self.views[view.key]

    def check_idle(self) -> None:
        assert not self.views, f"views held: {sorted(self.views)}"


class FeatureLoop(Loop):
    """Brings the hidden states a real engine would bring."""

    def _bring(self, key: int) -> None:
        self.views[key].hidden = dict(recompute(self.views[key].tokens[:-1]))

    def round(self, keys: list[int], budget: int, asked: bool = True) -> list[Proposal]:
        for key in keys:
            self._bring(key)
        return super().round(keys, budget, asked)


def test_a_feature_drafter_keeps_the_contract() -> None:
    drafter = FeatureDrafter(tiny_decoder("llama", 3), watch=False)
    assert isinstance(drafter, Drafter)
    loop = FeatureLoop(drafter, lambda prefix: (sum(prefix) * 31 + len(prefix)) % VOCAB)
    for key in range(3):
        loop.begin(key, [5 + key, 9, 30])
    for round_ in range(4):
        proposals = loop.round([0, 1, 2][: 3 - round_ % 2], 4, asked=round_ != 2)
        assert all(len(p) == 4 for p in proposals) or round_ == 2
    for key in range(3):
        loop.end(key)
    drafter.check_idle()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("chunk", [4, 512])
def test_hidden_states_of_exactly_the_committed_positions(lab: Lab, temperature: float, chunk: int) -> None:
    """After every round, over chunks, rejections, several sequences and the end inside a block."""
    target = tiny_decoder("llama", 3)
    asks = [
        request(
            [(7 * i + 3 * j) % VOCAB for j in range(3 + 4 * i)],
            id=str(i),
            draft="features",
            length=1 + i,
            temperature=temperature,
            seed=i,
            max_tokens=12 + i,
        )
        for i in range(3)
    ]
    plain = {r.request_id: lab.one(lab.engine(target), request(r.prompt, draft="none", params=r.params)) for r in asks}
    drafter = FeatureDrafter(target)
    results = lab.run(lab.engine(target, {"features": drafter}, prefill_chunk=chunk), asks, [0, 1, 3])
    for r in asks:
        assert results[r.request_id][0].tokens == plain[r.request_id].tokens
    assert drafter.looked > 20
    rejected = sum(r.proposed - r.accepted for r in lab.records)
    assert rejected > 5, "nothing was rejected"


def test_taps_of_a_pass_are_the_rows_of_its_spans() -> None:
    """A tree's nodes have the hidden states of their own paths."""
    target = tiny_decoder("llama", 3)
    cache = target.new_cache(1, 64)
    cache.reserve_capacity(64)
    span = Span(0, 0, [5, 6, 7, 8], parents=[-1, 0, 0, 2])
    step = build_inputs([span], cache.capacity, target.geometry, target.row_policy)
    hidden = target.forward(step, cache, LAYERS).hidden
    for row, path in enumerate([[5], [5, 6], [5, 7], [5, 7, 8]]):
        for layer, expected in recompute(path).items():
            assert_same(hidden[layer][row], expected[-1])
