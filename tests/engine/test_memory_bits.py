"""Bits do not depend on how a text was computed: in which chunks, from which prefix, preempted or not.

The row trial promises it (`RowPolicy.chunk_rows`); here it is seen on whole models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoders import decoder_of
from tiny_models import tiny_model
from toy import FAULTS, Lab, check_all_free, request

import paceline.decode.model.calls as calls_module
from paceline.decode.cache import KVCache
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.rows import CHUNK_ROWS
from paceline.decode.model.step import Span, build_inputs

LENGTH = 700


def long_decoder(kind: str, seed: int = 0, layers: int = 2) -> LlamaDecoder:
    return decoder_of(tiny_model(kind, seed, num_hidden_layers=layers, vocab_size=384, max_position_embeddings=1024))


def tokens(seed: int, length: int, vocabulary: int = 384) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def computed(decoder: LlamaDecoder, text: list[int], cuts: list[int], *, prefill: bool = True) -> list[torch.Tensor]:
    """Keys, values and last logits of a text computed in parts."""
    cache = decoder.new_cache(1, len(text))
    slot, start = cache.allocate(len(text)), 0
    for cut in cuts:
        with cache.transaction() as transaction:
            transaction.reserve(slot, cut)
            span = Span(slot, start, text[start : start + cut], want="last", prefill=prefill)
            inputs = build_inputs([span], cache.capacity, decoder.geometry, decoder.row_policy)
            logits = decoder.forward(inputs, cache).logits
            transaction.commit(slot, range(cut))
        start += cut
    assert start == len(text)
    return [layer.data[:, slot, :, :start].clone() for layer in cache.storage] + [logits[0].clone()]


@FAULTS
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gemma3_text", "qwen3_moe"])
def test_cuts_leave_the_bits_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str, fault: bool) -> None:
    """The fault joins two softmaxes where a chunk begins."""
    decoder = long_decoder(kind)
    assert decoder.row_policy.chunk_rows == CHUNK_ROWS, "on this machine bits depend on how prompts are cut"
    text = tokens(1, LENGTH)
    whole = computed(decoder, text, [512, 188])
    if fault:
        monkeypatch.setattr(calls_module, "_unmasked", lambda span, *rest: span.start)

    def check() -> None:
        for cuts in ([300, 100, 233, 67], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 92], [188, 512]):
            parts = computed(decoder, text, cuts)
            assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)), cuts
        decoded = computed(decoder, text, [32] * 20 + [1] * 60, prefill=False)
        assert all(torch.equal(a, b) for a, b in zip(whole, decoded, strict=True))

    lab.judge(fault, check)


def test_warm_and_preempted_texts_have_the_bits_of_cold_ones(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and their log-probabilities: alone and cold; as second turns; through a cache too small for all."""
    monkeypatch.setattr(KVCache, "block", 32)
    target, small = long_decoder("llama", layers=3), long_decoder("llama", seed=1, layers=1)
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "logprobs": 2}

    def ask(i: int, prompt: list[int]) -> Any:
        drafting = {"draft": "model", "length": 5} if i % 2 else {"draft": "none"}
        return request(prompt, id=str(i), seed=i, **drafting, **options)

    def engine(**more: Any) -> Any:
        model = ModelDrafter(small, name="model", max_positions=1024, slots=4)
        return lab.engine(target, {"model": model}, max_batch=4, max_context=1024, prefill_chunk=64, **more)

    cold = engine(prefix_cache=False)
    firsts = [ask(i, tokens(i, 90 + 37 * i)) for i in range(3)]
    first = [lab.one(cold, a) for a in firsts]
    seconds = [
        ask(10 + i, [*a.prompt, *ran.tokens, *tokens(50 + i, 21)])
        for i, (a, ran) in enumerate(zip(firsts, first, strict=True))
    ]
    second = [lab.one(cold, a) for a in seconds]
    cost = cold.cache.cost(32)
    preempted = {False: 0, True: 0}
    warm, tight = engine(), engine(cache_bytes=15 * cost)
    for one in (warm, tight):
        for asks, expected in ((firsts, first), (seconds, second)):
            results = lab.run(one, asks)
            for a, e in zip(asks, expected, strict=True):
                ran = results[a.request_id][0]
                assert ran.tokens == e.tokens and ran.logprobs == e.logprobs
                if one is warm and asks is seconds:
                    assert ran.sequence.stats.cached_tokens == len(a.prompt) - 22
                preempted[one is tight] += ran.sequence.stats.preemptions
        check_all_free(one)
    assert not preempted[False] and preempted[True]
