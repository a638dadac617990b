"""Log-probabilities of a prompt: those of the model after each prefix, and nothing changes for anybody else."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_decoders import tiny_decoder
from toy import Lab, ToyModel, hashed

from paceline.core.sampling import SamplingParams
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.sequence import Request, Sequence

PROMPT = tuple(int(t) for t in np.random.default_rng(0).integers(0, 23, 37))


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


@pytest.mark.parametrize("chunk", [1, 8, 12, 64])
def test_they_are_the_models_after_each_prefix(lab: Lab, chunk: int) -> None:
    """Beside plain requests that come and go, prompts cut anywhere."""
    logits = hashed(23, seed=3)
    engine = lab.engine(ToyModel(logits, 23), max_batch=4, max_context=64, prefill_chunk=chunk)
    scored = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1)
    beside = [Request(f"b{i}", PROMPT[: 5 + i], SamplingParams(max_tokens=4 + i)) for i in range(5)]
    ran = lab.run(engine, [beside[0], Request("s", PROMPT, scored), *beside[1:]], [0, 1, 1, 2, 3, 4])
    entries = ran["s"][0].sequence.prompt_logprobs
    assert [e.token_id for e in entries] == list(PROMPT[1:])
    for at, entry in enumerate(entries, start=1):
        row = log_softmax(logits(PROMPT[:at]))
        assert entry.logprob == pytest.approx(row[PROMPT[at]], abs=1e-5)
        assert [t for t, _ in entry.top] == list(np.argsort(-row, kind="stable")[:2])
    plain = lab.engine(ToyModel(logits, 23), max_context=64)
    alone = lab.one(plain, Request("a", PROMPT, SamplingParams(max_tokens=3)))
    assert ran["s"][0].tokens == alone.tokens and len(ran["s"][0].logprobs) == 3


def test_a_scored_neighbour_changes_no_bit() -> None:
    """The others' log-probabilities are bit-equal whether or not somebody beside them has a prompt scored."""

    def run(scored: bool) -> list[Sequence]:
        engine = Engine(tiny_decoder(), vocab_size=384, options=EngineOptions(max_context=96, prefill_chunk=32))
        params = SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True)
        sequences = [engine.add(Request(f"r{i}", tuple(range(3 + i, 20)), params))[0] for i in range(3)]
        asked = SamplingParams(max_tokens=1, prompt_logprobs=1 if scored else None)
        for i in range(2):
            engine.add(Request(f"s{i}", tuple(range(70 + i)), asked))
        while engine.has_work:
            engine.step()
        engine.check()
        return sequences

    for with_, without in zip(run(True), run(False), strict=True):
        assert with_.output == without.output and with_.logprobs == without.logprobs


def test_what_was_decoded_scores_the_same_as_a_prompt() -> None:
    engine = Engine(tiny_decoder(), vocab_size=384, options=EngineOptions(max_context=96, prefill_chunk=16))
    (said,) = engine.add(Request("a", (5, 6, 7), SamplingParams(max_tokens=30, logprobs=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, n=2)
    first, second = engine.add(Request("b", tuple(said.tokens), params))
    while engine.has_work:
        engine.step()
    again = first.prompt_logprobs[2:]
    assert [e.token_id for e in again] == said.output and not second.prompt_logprobs
    for one, other in zip(again, said.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.logprob == one.top[0][1], "what was said greedily is the likeliest"
