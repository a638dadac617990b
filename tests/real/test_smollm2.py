"""The embedded model on real prompts: whatever drafts, however far, in whatever batch, the text stays the same.

A small part of `bench/equality.py`, kept as a test: texts and log-probabilities, bit for bit, in both dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench.workloads import load_workload
from paceline.decode.sequence import DraftSettings

pytestmark = pytest.mark.models

TOKENS = 40
GREEDY = SamplingParams(max_tokens=TOKENS, logprobs=3)
SAMPLED = SamplingParams(max_tokens=TOKENS, logprobs=3, temperature=0.8, top_p=0.9, seed=7)
DRAFTS = [
    *(DraftSettings(name, length) for name in ("ngram", "suffix", "auto") for length in (7, None)),
    DraftSettings("suffix", 15),
    DraftSettings("model:smollm2-135m", 7),
    DraftSettings("suffix", 7, tree_size=12),
    DraftSettings("model:smollm2-135m", 4, tree_size=9),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    loaded = LLM("smollm2-135m", draft=["auto", "model:smollm2-135m"], dtype=request.param, threads=2, max_context=1024)
    yield loaded
    loaded.engine.check()


@pytest.fixture(scope="module")
def prompts(llm: LLM, shared: Path) -> list[list[int]]:
    assert llm.tokenizer is not None
    texts = [p for kind in ("chat", "code_edit") for p in load_workload(kind, shared / "workloads", 3).prompts]
    return [llm.tokenizer.encode_chat(p.messages) for p in texts]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_drafter_gives_the_plain_text(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    plain = llm.generate(prompts, params, draft=DraftSettings())
    alone = llm.generate([prompts[0]], params, draft=DraftSettings("auto"))
    assert alone[0].completions[0].token_ids == plain[0].completions[0].token_ids
    for draft in DRAFTS:
        for ours, base in zip(llm.generate(prompts, params, draft=draft), plain, strict=True):
            got, want = ours.completions[0], base.completions[0]
            assert got.token_ids == want.token_ids, draft
            assert got.text == want.text
            assert got.logprobs == want.logprobs, f"{draft}: the bits of the logits depend on the pass"


def test_the_target_as_its_own_draft_accepts_everything(llm: LLM, prompts: list[list[int]]) -> None:
    for params in (GREEDY, SAMPLED):
        for output in llm.generate(prompts, params, draft=DraftSettings("model:smollm2-135m", 7)):
            stats = output.completions[0].stats
            ended = output.completions[0].finish_reason == "stop"
            assert stats.accepted == stats.drafted or ended, stats


def test_mixed_requests_keep_their_texts(llm: LLM, prompts: list[list[int]]) -> None:
    plain = llm.generate(prompts, GREEDY, draft=DraftSettings())
    drafts = [DRAFTS[i % len(DRAFTS)] if i % 3 else DraftSettings() for i in range(len(prompts))]
    for ours, base in zip(llm.generate(prompts[::-1], GREEDY, draft=drafts), plain[::-1], strict=True):
        assert ours.completions[0].token_ids == base.completions[0].token_ids


def test_plain_text_is_that_of_transformers(llm: LLM, prompts: list[list[int]]) -> None:
    """float32 and greedy: equal, or parting where Transformers' own logits put our token within 1e-3 of its."""
    if llm.dtype is not torch.float32:
        return
    from paceline.bench.reference import Reference
    from paceline.decode.model.checkpoint import load_checkpoint

    reference = Reference(load_checkpoint("smollm2-135m", dtype=torch.float32))
    ours = llm.generate(prompts[::2], GREEDY, draft=DraftSettings())
    for prompt, output in zip(prompts[::2], ours, strict=True):
        done = output.completions[0]
        with torch.inference_mode():
            logits = reference.module(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert float(gap.max()) < 1e-3, f"token {int(gap.argmax())} lies {float(gap.max())} below the best"
        scored = logits.double().log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert done.logprobs is not None
        assert max(abs(a.logprob - float(b)) for a, b in zip(done.logprobs, scored, strict=True)) < 1e-4
