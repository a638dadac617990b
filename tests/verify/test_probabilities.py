"""Processed logits, probabilities and draws against their twins, over all options alone and combined."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import verify_twins as twins
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.logprobs import token_logprobs
from paceline.decode.verify.noise import Purpose, position_keys, request_key
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.probabilities import (
    draw,
    draw_by_definition,
    greedy_tokens,
    is_plain_greedy,
    processed_logits,
    to_probs,
)
from paceline.decode.verify.support import block_maxima, largest
from paceline.errors import InvalidParameter, RequestFailed


@dataclass
class Case:
    logits: torch.Tensor
    params: SamplingParams
    vocab_size: int
    prompt: list[int]
    output: list[int]
    paths: list[list[int]]
    eos: frozenset[int]
    seed: int

    def prefix(self) -> PrefixState:
        state = PrefixState(self.prompt, self.params, self.vocab_size, self.eos)
        half = len(self.output) // 2
        state.commit(self.output[:half])
        if self.params.has_penalties:
            state.counts()  # so that the second half is counted incrementally
        state.commit(self.output[half:])
        return state

    def keys(self) -> torch.Tensor:
        positions = [len(self.prompt) + len(self.output) + len(path) for path in self.paths]
        return position_keys(request_key(self.seed, 0), torch.tensor(positions), Purpose.TARGET)

    def twin_logits(self) -> list[np.ndarray]:
        return [
            twins.processed_logits(
                row.numpy(), self.params, self.prompt, self.output + path, self.vocab_size, self.eos
            )
            for row, path in zip(self.logits, self.paths, strict=True)
        ]


OPTIONS = {
    "top_k": st.integers(1, 80),
    "top_p": st.floats(0.01, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.25, 4.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "min_tokens": st.integers(0, 8),
    "stop_token_ids": None,
    "ignore_eos": st.booleans(),
}


@st.composite
def cases(draw: st.DrawFn, only: str | None = None) -> Case:
    vocab = draw(st.integers(3, 70))
    width = vocab + draw(st.integers(-2, 9))
    token = st.integers(0, vocab - 1)
    few = st.lists(token, max_size=6)
    dependent = {
        "logit_bias": st.dictionaries(token, st.floats(-100, 100, width=32), min_size=1, max_size=4),
        "bad_words": st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5).map(
            tuple
        ),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=vocab).map(tuple),
        "stop_token_ids": st.lists(token, min_size=1, max_size=2).map(tuple),
    }
    names = [only] if only else sorted(draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=5)))
    chosen = {name: draw(dependent.get(name, OPTIONS[name])) for name in names}
    temperature = draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]))
    rows = draw(st.integers(1, 4))
    # A coarse grid makes ties; a sharp one makes them rare.
    step = draw(st.sampled_from([0.5, 1e-4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    limit = int(6 / step)
    logits = torch.randint(-limit, limit + 1, (rows, width), generator=generator) * step
    if draw(st.booleans()):
        logits = logits.bfloat16().float()
    return Case(
        logits,
        SamplingParams(temperature=temperature, max_tokens=None, **chosen),
        vocab,
        draw(few),
        draw(few),
        [draw(few) for _ in range(rows)],
        frozenset(draw(st.sets(token, max_size=2))),
        draw(st.integers(0, 99)),
    )


def check(case: Case) -> None:
    """Fast and slow agree on every row, nothing is written into the input, and rows are independent."""
    before = case.logits.clone()
    expected = case.twin_logits()
    prefix = case.prefix()
    fast = processed_logits(case.logits, case.params, prefix, case.paths)
    np.testing.assert_array_equal(fast.numpy(), np.stack(expected))
    if any(np.isneginf(row).all() for row in expected):
        with pytest.raises(RequestFailed, match="no token is possible"):
            draw(case.logits, case.params, prefix, case.paths, case.keys())
        return
    slow = [twins.to_probs(row, case.params) for row in expected]
    assume(all(distance > 1e-6 for _, distance in slow))
    probs = to_probs(case.logits, case.params, prefix, case.paths)
    np.testing.assert_allclose(probs.numpy(), np.stack([p for p, _ in slow]), rtol=2e-6, atol=1e-30)
    tokens = draw(case.logits, case.params, prefix, case.paths, case.keys())
    assert torch.equal(tokens, draw_by_definition(case.logits, case.params, prefix, case.paths, case.keys()))
    for row, (p, _) in enumerate(slow):
        token, behind = twins.draw(p, np.uint64(case.keys()[row].item() % 2**64))
        assert token == tokens[row].item() or behind < 1 + 1e-5
        alone = [case.logits[row : row + 1], case.params, case.prefix(), case.paths[row : row + 1]]
        assert torch.equal(to_probs(*alone)[0], probs[row])
        assert draw(*alone, case.keys()[row : row + 1]).item() == tokens[row].item()
    assert torch.equal(case.logits, before)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_all_options_combined_equal_their_twins(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_each_option_alone_equals_its_twin(option: str) -> None:
    settings(max_examples=40, deadline=None)(given(cases(only=option))(check))()


LONG_OPTIONS = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 40},
    {"top_k": 3000, "top_p": 0.5},
    {"min_p": 0.05},
    {"min_p": 1e-4, "top_p": 0.95},
    {"repetition_penalty": 1.3, "top_p": 0.8},
]


@pytest.mark.parametrize("width", [5000, 20_000])
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("options", LONG_OPTIONS, ids=str)
def test_long_rows_from_flat_to_peaked(width: int, scale: float, options: dict[str, float]) -> None:
    """Each way the candidates can be found: few blocks, more, all. bfloat16 grids make many ties."""
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(3, width, generator=generator) * scale).bfloat16()
    params = SamplingParams(temperature=0.8, **options)
    prefix = PrefixState(range(100), params, width - 7, frozenset())
    keys = position_keys(request_key(5, 0), torch.arange(3), Purpose.TARGET)
    paths = [[], [3], [3, 4]]
    processed = processed_logits(logits, params, prefix, paths)
    probs = to_probs(logits, params, prefix, paths)
    expected, distance = twins.to_probs(processed[1].numpy(), params)
    if distance > 1e-6:
        np.testing.assert_allclose(probs[1].numpy(), expected, rtol=1e-5, atol=1e-30)
    else:  # a cut too close to call in float32: one token may lie on the other side of it
        assert abs(int((probs[1] > 0).sum()) - int((expected > 0).sum())) <= 1
        assert np.abs(probs[1].numpy() - expected).sum() < 2.5 * expected[expected > 0].min() + 1e-6
    many = position_keys(request_key(6, 0), torch.arange(60), Purpose.TARGET)
    for some, chosen in ((logits, keys), (logits[:1].expand(60, -1), many)):
        where = paths if len(some) == 3 else [[]] * 60
        tokens = draw(some, params, prefix, where, chosen)
        assert torch.equal(tokens, draw_by_definition(some, params, prefix, where, chosen))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(0, 60), st.integers(0, 10**6))
def test_largest_is_a_stable_sort(width: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (2, width), generator=generator).float() * 0.5
    logits[0, ::3] *= -0.0
    values, ids = largest(logits, count, block_maxima(logits))
    for row in range(2):
        order = sorted(range(width), key=lambda i: (-logits[row, i].item(), i))[:count]
        assert ids[row].tolist() == order
        assert torch.equal(values[row], logits[row, order])


def test_largest_looks_past_equal_logits_in_a_long_row() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 40_000:40_010] = 1.0
    assert largest(logits, 30, block_maxima(logits))[1][0].tolist() == [*range(40_000, 40_010), *range(20)]


def plain(params: SamplingParams, vocab: int = 8) -> PrefixState:
    return PrefixState([1], params, vocab, frozenset([0]))


def test_plain_greedy_is_argmax_of_real_ids() -> None:
    params = SamplingParams()
    assert is_plain_greedy(params, plain(params))
    logits = torch.tensor(
        [[1.0, 3, 3, 0, 9], [-math.inf, -math.inf, -5, -math.inf, 9], [0, 1, math.nan, 2, 3]]
    )
    tokens, usable = greedy_tokens(logits, 4)
    assert tokens[:2].tolist() == [1, 2] and usable.tolist() == [True, True, False]
    assert draw(
        logits[:2], params, plain(params, 4), [[], []], torch.zeros(2, dtype=torch.int64)
    ).tolist() == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": (1,)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_not_plain_greedy(options: dict[str, object]) -> None:
    params = SamplingParams(**options)
    assert not is_plain_greedy(params, plain(params))


def test_plain_greedy_once_min_tokens_is_reached() -> None:
    params = SamplingParams(min_tokens=2)
    prefix = plain(params)
    prefix.commit([3, 4])
    assert is_plain_greedy(params, prefix)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    for p in (params, SamplingParams(temperature=temperature)):
        logits = torch.tensor([[1.0, 2.0, 3.0, -math.inf], [3.0, 2.0, 1.0, 0.0]])
        keys = position_keys(3, torch.arange(2), Purpose.TARGET)
        assert draw(logits, p, plain(p, 4), [[], []], keys).tolist() == [2, 0]
        assert torch.equal(to_probs(logits, p, plain(p, 4), [[], []]).argmax(-1), torch.tensor([2, 0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_share_all_probability(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits = torch.tensor([[1.0, math.inf, -math.inf, math.inf], [0.0, 0.0, 0.0, 0.0]])
    probs = to_probs(logits, params, plain(params, 4), [[], []])
    assert probs[0].tolist() == ([0, 0.5, 0, 0.5] if temperature else [0, 1, 0, 0])
    assert probs[1].tolist() == ([0.25] * 4 if temperature else [1, 0, 0, 0])
    keys = position_keys(3, torch.arange(2), Purpose.TARGET)
    assert draw(logits, params, plain(params, 4), [[], []], keys)[0].item() in (1, 3)


def test_options_naming_ids_outside_the_vocabulary_are_refused() -> None:
    for options in ({"logit_bias": {9: 1.0}}, {"allowed_token_ids": (9,)}, {"bad_words": ((1, 9),)}):
        with pytest.raises(InvalidParameter, match="below 8"):
            plain(SamplingParams(**options))


def test_bad_words_as_strings_are_our_own_bug_here() -> None:
    params = SamplingParams(bad_words=("x",))
    with pytest.raises(AssertionError, match="not resolved"):
        draw(torch.zeros(1, 8), params, plain(params), [[]], torch.zeros(1, dtype=torch.int64))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(0, 12), st.integers(0, 9), st.integers(0, 10**6))
def test_logprobs_are_the_models_own(vocab: int, top: int, padding: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 8, (3, vocab + padding), generator=generator).float()
    logits[0, 0] = -math.inf if vocab > 1 else 0.0
    tokens = torch.randint(0, vocab, (3,), generator=generator)
    result = token_logprobs(logits, tokens, top, vocab)
    expected = torch.log_softmax(logits[:, :vocab].double(), dim=-1).numpy()
    for row in range(3):
        np.testing.assert_allclose(result.chosen[row], expected[row, tokens[row]], rtol=1e-6, atol=1e-6)
        order = sorted(range(vocab), key=lambda i: (-logits[row, i].item(), i))[:top]
        assert result.ids[row].tolist() == order
        np.testing.assert_allclose(result.logprobs[row], expected[row, order], rtol=1e-6, atol=1e-6)
