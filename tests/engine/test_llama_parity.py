"""`LlamaDecoder` against Transformers' own modules on tiny random weights of every family, in float32.

Logits agree within 1e-5 of the largest logit in ragged passes that mix prompt chunks, plain steps, verify blocks
and a tree; greedy text is that of `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny_decoders import decoder_of
from tiny_models import tiny_model
from torch import Tensor
from toy import Lab, Scripted, branching, following, request

from paceline.decode.cache import KVCache
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import Span, build_inputs

VOCAB = 384
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
SHORT = {"original_max_position_embeddings": 32}
FACTORS = [1.0 + 0.2 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": FACTORS,
    **SHORT,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    "llama llama3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE, **SHORT}},
    ),
    "llama yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE, **SHORT}}),
    "llama longrope": ("llama", {"rope_parameters": LONGROPE | {"short_factor": FACTORS, "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", **ROPE, **SHORT}}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 16}),
    "mixtral window": ("mixtral", {"sliding_window": 16}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe mixed": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 tied": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 linear tied": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", **ROPE},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 16}),
    "phi3 partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}
EVERY = pytest.mark.parametrize("name", MODELS)


@cache
def pair(name: str) -> tuple[Any, LlamaDecoder]:
    kind, changes = MODELS[name]
    module = tiny_model(kind, 4, **changes)
    return module, decoder_of(module)


def reference(module: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after each token, without a cache."""
    with torch.inference_mode():
        return module(torch.tensor([list(tokens)]), use_cache=False).logits[0]


def text(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * i * 11 + 5 * i) % VOCAB for i in range(length)]


class Passes:
    """A cache and its sequences, committed as the engine would; every pass is held against the reference."""

    def __init__(self, module: Any, decoder: LlamaDecoder, slots: int) -> None:
        self.module, self.decoder = module, decoder
        self.cache: KVCache = decoder.new_cache(slots, 120)
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        for _ in range(slots):
            self.cache.allocate(120)

    def run(self, blocks: dict[int, tuple[list[int], list[int] | None, bool, list[int]]]) -> None:
        """By slot: tokens, parents, whether it is a prompt chunk, and which rows are kept."""
        with self.cache.transaction() as transaction:
            spans = []
            for slot, (tokens, parents, prefill, _) in blocks.items():
                start = transaction.reserve(slot, len(tokens))
                spans.append(Span(slot, start, tokens, parents, "last" if prefill else "all", prefill))
            step = build_inputs(spans, self.cache.capacity, self.decoder.geometry, self.decoder.row_policy)
            logits = self.decoder.forward(step, self.cache).logits
            for (slot, (tokens, parents, _, kept)), (first, count) in zip(blocks.items(), step.logits_of, strict=True):
                rows = range(len(tokens))[-count:]
                expected = torch.stack([self._after(slot, tokens, parents, row) for row in rows])
                given = logits[first : first + count]
                torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
                transaction.commit(slot, Span(slot, 0, tokens, parents).places(kept))
                self.texts[slot] += [tokens[row] for row in kept]

    def _after(self, slot: int, tokens: list[int], parents: list[int] | None, row: int) -> Tensor:
        path = []
        while row >= 0:
            path.append(tokens[row])
            row = row - 1 if parents is None else parents[row]
        return reference(self.module, self.texts[slot] + path[::-1])[-1]


@EVERY
def test_ragged_passes(name: str) -> None:
    passes = Passes(*pair(name), slots=4)
    first, second, third = text(1, 70), text(2, 9), text(3, 40)
    passes.run({0: (first[:50], None, True, list(range(50))), 2: (third, None, True, list(range(40)))})
    tree = ([7, 8, 9, 10, 11, 12, 13], [-1, 0, 0, 2, 2, 1, 4])
    passes.run(
        {
            0: (first[50:], None, True, list(range(20))),  # a prompt's second chunk
            1: (second, None, True, list(range(9))),
            2: (*tree, False, [0, 2, 4, 6]),
        }
    )
    assert passes.texts[2][-4:] == [7, 9, 11, 13]
    passes.run(
        {
            0: ([5], None, False, [0]),  # a plain step
            1: (text(5, 6), None, False, [0, 1, 2]),  # a verify block, half accepted
            2: ([21], None, False, [0]),
            3: ([33], None, True, [0]),
        }
    )
    passes.run({1: (text(6, 3), None, False, [0]), 2: (text(7, 17), None, False, []), 3: ([1, 2], None, False, [0])})
    passes.run({2: ([40], None, False, [0]), 0: ([6, 7], [-1, 0], False, [0, 1])})


@EVERY
def test_a_tree_commit_moves_the_right_rows(name: str) -> None:
    """Keys and values after the commit are those of the same tokens written one after another."""
    module, decoder = pair(name)
    grown, straight = Passes(module, decoder, 2), Passes(module, decoder, 2)
    start = text(8, 12)
    chosen = [0, 2, 5, 6]
    tree = ([3, 4, 5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 2, 5, 0])
    for passes in (grown, straight):
        passes.run({1: (start, None, True, list(range(12)))})
    grown.run({1: (*tree, False, chosen)})
    straight.run({1: ([tree[0][i] for i in chosen], None, False, [0, 1, 2, 3])})
    assert grown.texts == straight.texts and grown.cache.committed(1) == 16
    for layer in range(2):
        for given, expected in zip(
            grown.cache.keys_values(layer, 1, 2, 16), straight.cache.keys_values(layer, 1, 2, 16), strict=True
        ):
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@EVERY
@pytest.mark.parametrize("draft", ["none", "chain", "tree"])
def test_greedy_text_is_that_of_generate(lab: Lab, name: str, draft: str) -> None:
    module, decoder = pair(name)
    prompts = [text(9, 5), text(10, 21)]
    answers: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        answers[tuple(prompt)] = whole[0, len(prompt) :].tolist()
    assert "tied" in name or all(len(set(answer)) > 6 for answer in answers.values()), "texts that say nothing"

    def truth(view: Any) -> list[int]:
        return answers[tuple(view.tokens[: view.prompt_len])]

    drafters = {
        "chain": Scripted(following(truth, [2, (5, 5), 0], VOCAB), "chain"),
        "tree": Scripted(branching(truth, VOCAB), "tree"),
    }
    engine = lab.engine(decoder, drafters, eos=[2], prefill_chunk=8)
    asks = [request(p, id=str(i), draft=draft, length=6, max_tokens=24) for i, p in enumerate(prompts)]
    for r, (ran,) in zip(asks, lab.run(engine, asks, [0, 1]).values(), strict=True):
        assert ran.tokens == answers[r.prompt]
        assert draft == "none" or ran.sequence.stats.accepted > 3
