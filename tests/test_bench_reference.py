"""The Transformers arm of the benchmarks holds the checkpoint's weights, and its greedy texts are ours."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, save_folder, tiny_backend, tiny_model

from paceline import LLM, SamplingParams
from paceline.bench.reference import Reference, TopLogits
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.sequence import DraftSettings

PROMPT = list(range(5, 25))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gemma3_text", "phi3"])
def test_the_module_is_the_checkpoint_and_its_greedy_texts_are_ours(tmp_path: Path, kind: str) -> None:
    """Without padding rows, whose ids we never produce and Transformers does."""
    original = tiny_model(kind, seed=3, max_position_embeddings=1024, vocab_size=VOCABULARY - 10)
    folder = str(save_folder(tmp_path / "m", original, tiny_backend()))
    reference = Reference(load_checkpoint(folder, dtype=torch.float32))
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(reference.module(ids).logits, original.eval()(ids).logits)
    llm = LLM(folder, draft="ngram", dtype="float32", max_batch=1)
    params = SamplingParams(max_tokens=24)
    ours = llm.generate([PROMPT], params, draft=DraftSettings("ngram", 3))[0].completions[0].token_ids
    assert reference.generate(PROMPT, 24).token_ids == tuple(ours)


def test_every_token_has_its_time_and_its_top_logits(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path / "m", tiny_model(), tiny_backend()))
    reference = Reference(load_checkpoint(folder, dtype=torch.float32))
    ticks = count()
    output = reference.generate(PROMPT, 8, top=3, clock=lambda: float(next(ticks)))
    assert output.times_s == tuple(float(i) for i in range(1, len(output.token_ids) + 1))
    for token, top in zip(output.token_ids, output.top, strict=True):
        assert top.ids[0] == token and top.gap_to(token) == 0.0 and len(top.ids) == 3
    plain = reference.generate(PROMPT, 8)
    assert plain.token_ids == output.token_ids and plain.top == ()


def test_gaps() -> None:
    top = TopLogits((7, 9), (2.5, 2.0))
    assert top.gap_to(9) == 0.5 and top.gap_to(1) is None
