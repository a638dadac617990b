"""Every family from a folder on disk: the same text and bits whatever drafts, with windows and long texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_llama_parity import LONGROPE, VOCAB, text
from tiny_decoders import _policy, decoder_of
from tiny_models import save_folder, tiny_backend, tiny_model
from toy import FAULTS, Lab, Scripted, following, request

import paceline.decode.model.llama as llama_module
from paceline import LLM, SamplingParams
from paceline.decode.model.families import FAMILIES
from paceline.decode.model.step import Ring
from paceline.decode.sequence import DraftSettings

WINDOWS = {"mistral": {"sliding_window": 16}, "mixtral": {"sliding_window": 16}, "phi3": {"sliding_window": 16}}


@pytest.fixture(autouse=True)
def policies_by_shape() -> Iterator[None]:
    with mock.patch.object(llama_module, "find_row_policy", _policy):
        yield


def load(folder: Path, dtype: str, **options: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no padding tried")
        return LLM(str(folder), draft=["auto", f"model:{folder}"], dtype=dtype, **options)


def words(seed: int, length: int) -> list[int]:
    """Ids the tiny tokenizer has."""
    return [token % 370 for token in text(seed, length)]


def transformers_text(module: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    whole = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_text_and_bits_do_not_depend_on_drafts(kind: str, tmp_path: Path) -> None:
    """Prompts longer and shorter than the window, alone and together, greedy and sampled, in both dtypes."""
    module = tiny_model(kind, 4, vocab_size=400, **WINDOWS.get(kind, {}))  # 26 rows of the head are padding
    folder = save_folder(tmp_path, module, tiny_backend())
    prompts = [words(i, length) for i, length in enumerate((3, 30, 50, 12))]
    for dtype in ("float32", "bfloat16"):
        llm = load(folder, dtype)
        own = DraftSettings(f"model:{folder}", 4)
        assert llm.checkpoint.vocab_size < 400
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=30, logprobs=1, temperature=temperature, seed=3, ignore_eos=True)
            plain = [llm.generate([p], params, draft=DraftSettings())[0].completions[0] for p in prompts]
            if dtype == "float32" and temperature == 0.0:
                assert plain[1].token_ids == transformers_text_within(module, llm, prompts[1])
            for draft in (DraftSettings("ngram", 4), DraftSettings("suffix", 6), own):
                for asked in (prompts, prompts[1:2]):
                    ran = [o.completions[0] for o in llm.generate(asked, params, draft=draft)]
                    for got, want in zip(ran, plain if asked is prompts else plain[1:2], strict=True):
                        assert got.token_ids == want.token_ids, (dtype, draft)
                        if llm.engine.model.row_policy.proved:
                            assert got.logprobs == want.logprobs, (dtype, draft)
                            assert draft is not own or got.stats.accepted == got.stats.drafted


def transformers_text_within(module: Any, llm: LLM, prompt: list[int]) -> list[int]:
    """Greedy text of the module over the ids that mean something."""
    said: list[int] = []
    with torch.inference_mode():
        for _ in range(30):
            logits = module(torch.tensor([prompt + said]), use_cache=False).logits[0, -1]
            said.append(int(logits[: llm.checkpoint.vocab_size].argmax()))
    return said


RINGS = {"mistral": {"sliding_window": 16}, "gemma2": {}, "gemma3_text": {}}
PLANS: dict[str, list[Any]] = {"accept": [99], "reject": [0], "alternating": [(99, 20), (0, 20), (2, 5)]}


@FAULTS
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("length", [4, 20])
@pytest.mark.parametrize("kind", RINGS)
def test_sd_18_ring_with_writes_of_several_tokens(lab: Lab, kind: str, length: int, plan: str, fault: bool) -> None:
    """Window 16 in a ring of 40 rows. The fault is a ring with room for one token beside the window."""
    module = tiny_model(kind, 4, **RINGS[kind])
    decoder = decoder_of(module)
    ring = Ring(16, 16 if fault else 40)
    decoder.geometry = replace(decoder.geometry, ring=ring)
    prompts = [text(9, 10), text(10, 45)]  # the second is longer than a pass may write
    answers = {tuple(p): transformers_text(module, p, 64) for p in prompts}
    drafter = Scripted(following(lambda view: answers[tuple(view.tokens[: view.prompt_len])], PLANS[plan], VOCAB))

    def check() -> None:
        with mock.patch.object(Ring, "largest_write", 25):
            engine = lab.engine(decoder, drafter)
            asks = [request(p, id=str(i), length=length, max_tokens=64) for i, p in enumerate(prompts)]
            for ask, (ran,) in zip(asks, lab.run(engine, asks, [0, 3]).values(), strict=True):
                assert ran.tokens == answers[ask.prompt]
                assert (plan == "reject") == (ran.sequence.stats.accepted == 0)
        rows = {layer.rows for layer in engine.cache.storage}
        assert min(rows) == ring.rows

    lab.judge(fault, check)


def test_drafts_longer_than_the_ring_allows_are_cut(lab: Lab) -> None:
    module = tiny_model("mistral", 4, sliding_window=16)
    decoder = decoder_of(module)
    decoder.geometry = replace(decoder.geometry, ring=Ring(16, 22))  # 7 tokens a pass
    prompt = text(9, 30)
    answer = transformers_text(module, prompt, 60)
    engine = lab.engine(decoder, Scripted(following(lambda _: answer, [99], VOCAB)))
    ran = lab.one(engine, request(prompt, length=40, max_tokens=60))
    assert ran.tokens == answer
    assert max(record.proposed for record in lab.records) == 6


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_a_text_longer_than_a_real_ring(kind: str, tmp_path: Path) -> None:
    """Rings of 1,024 rows: prompts of 1,000 tokens grow past their end while drafts are checked."""
    module = tiny_model(kind, 4, max_position_embeddings=2048)
    folder = save_folder(tmp_path, module, tiny_backend())
    llm = load(folder, "float32", max_context=1536)
    prompts = [words(1, 1000), words(2, 1010), words(3, 600)]
    params = SamplingParams(max_tokens=40, logprobs=1, ignore_eos=True)
    plain = [llm.generate([p], params, draft=DraftSettings())[0].completions[0] for p in prompts]
    own = transformers_text(module, prompts[0], 40)
    assert max(own) >= llm.checkpoint.vocab_size or plain[0].token_ids == own
    for draft in (DraftSettings("suffix", 8), DraftSettings(f"model:{folder}", 7)):
        for got, want in zip(llm.generate(prompts, params, draft=draft), plain, strict=True):
            assert got.completions[0].token_ids == want.token_ids
            if llm.engine.model.row_policy.proved:
                assert got.completions[0].logprobs == want.logprobs


class TestLongRope:
    """Short and long frequencies by what a sequence may grow to; original context 32, whole context 128."""

    module: Any
    long: Any

    @pytest.fixture(autouse=True)
    def models(self) -> None:
        changes = {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE_TWO}
        self.module = tiny_model("phi3", 4, **changes)
        only_long = LONGROPE_TWO | {"short_factor": LONGROPE_TWO["long_factor"]}
        self.long = tiny_model("phi3", 4, **(changes | {"rope_parameters": only_long}))

    def run(self, lab: Lab, asks: list[Any], answers: Any, plan: Any = (3,)) -> dict[str, list[int]]:
        engine = lab.engine(
            decoder_of(self.module),
            Scripted(following(lambda view: answers[tuple(view.tokens[: view.prompt_len])], list(plan), VOCAB)),
        )
        return {name: ran.tokens for name, (ran,) in lab.run(engine, asks).items()}

    def test_short_and_long_sequences_beside_each_other(self, lab: Lab) -> None:
        """Within the original context, and from the start past it, texts are those of Transformers."""
        short, long = text(9, 8), text(10, 40)
        answers = {tuple(p): transformers_text(self.module, p, 24) for p in (short, long)}
        assert answers[tuple(short)] != transformers_text(self.long, short, 24), "the factors make no difference"
        asks = [request(p, id=str(len(p)), length=4, max_tokens=24) for p in (short, long)]
        got = self.run(lab, asks, answers)
        assert got == {"8": answers[tuple(short)], "40": answers[tuple(long)]}

    def test_a_sequence_that_may_grow_past_is_long_from_its_start(self, lab: Lab) -> None:
        prompt = text(9, 8)
        answer = transformers_text(self.long, prompt, 60)
        for plan in ((0,), (99,), (2, 0)):
            ask = request(prompt, length=4, max_tokens=60)
            assert self.run(lab, [ask], {tuple(prompt): answer}, plan) == {"r": answer}


LONGROPE_TWO = LONGROPE | {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}
