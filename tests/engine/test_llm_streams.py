"""Long prompts alone, streams side by side, and requests that are refused before they run."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import tiny_decoder
from tiny_models import save_folder, tiny_backend, tiny_model

from paceline import LLM, SamplingParams
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.model.attention import ACTIVATIONS, by_rows
from paceline.decode.sequence import DraftSettings, Request
from paceline.decode.verify.leniency import TopWithin, Typical
from paceline.errors import InvalidParameter, ModelNotFound, UsageError

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_folder(tmp_path_factory.mktemp("llm") / "m", tiny_model(), tiny_backend())
    return LLM(str(folder), dtype="float32", max_batch=4)


def test_a_prompt_of_several_chunks_alone() -> None:
    """No row of its first pass wants logits."""
    texts = []
    for chunk in (8, 64):
        engine = Engine(tiny_decoder(), vocab_size=384, options=EngineOptions(max_context=96, prefill_chunk=chunk))
        (sequence,) = engine.add(Request("r", tuple(range(20)), SamplingParams(max_tokens=8)))
        while engine.has_work:
            engine.step()
        engine.check()
        texts.append(sequence.output)
    assert texts[0] == texts[1]


def test_streams_side_by_side_are_whole(llm: LLM) -> None:
    alone = [llm.generate(p, PARAMS)[0].text for p in ("the cat", "a dog ran")]
    first, second = llm.stream("the cat", PARAMS), llm.stream("a dog ran", PARAMS)
    pieces: list[list[str]] = [[], []]
    for deltas in zip_longest(first, second):  # drafts are chosen by time, so either may end first
        for text, delta in zip(pieces, deltas, strict=True):
            text.append("" if delta is None else delta.text)
    assert first.output.text == alone[0] and second.output.text == alone[1]
    assert ["".join(p) for p in pieces] == alone


def test_generate_beside_an_open_stream_leaves_it_alone(llm: LLM) -> None:
    whole = llm.generate("the cat", PARAMS)[0].text
    stream = llm.stream("the cat", PARAMS)
    deltas = iter(stream)
    text = next(deltas).text
    llm.generate("a dog ran", PARAMS)
    assert text + "".join(d.text for d in deltas) == whole
    llm.engine.check()


def test_a_stream_left_early_frees_its_slot(llm: LLM) -> None:
    for _ in llm.stream("the cat", PARAMS):
        break
    abandoned = llm.stream("the cat", PARAMS)
    abandoned.close()
    assert not llm.engine.has_work
    llm.engine.check()


def test_what_cannot_run_is_refused(llm: LLM, tmp_path: Path) -> None:
    sampled = SamplingParams(temperature=0.8, max_tokens=2)
    with pytest.raises(InvalidParameter, match="greedy"):
        llm.generate("x", sampled, draft=DraftSettings(verify="greedy"))
    with pytest.raises(InvalidParameter, match="draft_length"):
        llm.generate("x", draft=DraftSettings("ngram", 2.5))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="surrogate"):
        llm.generate("\udcff")
    with pytest.raises(ModelNotFound):
        LLM("x" * 300 + "/y" * 200)
    with pytest.raises(UsageError, match="'blok'"):
        LLM(str(tmp_path / "never-read"), verify="blok")
    with pytest.raises(InvalidParameter, match="under the rule 'block'"):
        LLM(str(tmp_path / "never-read"), verify="block", relaxed=Typical())
    with pytest.raises(InvalidParameter, match="under the rule 'coupled'"):
        llm.generate("x", draft=DraftSettings(relaxed=TopWithin(2, 0.5)))
    with pytest.raises(InvalidParameter, match="TopWithin"):
        llm.generate("x", draft=DraftSettings(verify="relaxed", relaxed="top:2,0.5"))  # type: ignore[arg-type]
    assert not llm.engine.has_work


@pytest.mark.parametrize("function", [*ACTIVATIONS.values(), torch.tanh], ids=[*ACTIVATIONS, "tanh"])
@pytest.mark.parametrize("rows", [3, 16, 28, 100])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, function: Any) -> None:
    gate = torch.randn(rows, 2 * 4864, generator=torch.Generator().manual_seed(0)).chunk(2, dim=-1)[0]
    threads = torch.get_num_threads()
    alone = torch.cat([by_rows(function, gate[i : i + 1]) for i in range(rows)])
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(by_rows(function, gate), alone)
    finally:
        torch.set_num_threads(threads)
