"""Siblings of one race: `coupled` over trees, every outcome of the noise enumerated, and the order of the siblings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.proposal import Proposal, Verdict
from paceline.core.sampling import SamplingParams
from paceline.decode.verify.noise import Purpose, exponential_noise, position_keys
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.probabilities import draw, greedy_tokens, leading_tokens, leading_tokens_greedy, to_probs
from paceline.decode.verify.rules import row_paths, walk
from paceline.errors import RequestFailed

VOCAB, GRID, DEPTH = 3, (1.0, 2.0, 5.0), 2
Model = Callable[[tuple[int, ...]], np.ndarray]
Noise = tuple[tuple[float, ...], ...]  # by position, by token


def model(seed: int) -> Model:
    """Probabilities [VOCAB] after each short text; no two races of the grid end in a tie."""
    generator = np.random.default_rng(seed)
    texts = [text for length in range(DEPTH + 1) for text in itertools.product(range(VOCAB), repeat=length)]
    table = {text: generator.dirichlet(np.ones(VOCAB)) for text in texts}
    return lambda text: table[text]


def race(probs: np.ndarray, noise: tuple[float, ...]) -> list[int]:
    return [int(i) for i in np.argsort(np.array(noise) / probs)]


def sibling_tree(draft: Model, noise: Noise) -> Proposal:
    """The first two of the draft's race after the text, and again after each of them."""
    tokens: list[int] = []
    parents: list[int | None] = []
    for child in race(draft(()), noise[0])[:2]:
        tokens.append(child)
        parents.append(None)
    for node in (0, 1):
        for child in race(draft((tokens[node],)), noise[1])[:2]:
            tokens.append(child)
            parents.append(node)
    return Proposal(tuple(tokens), tuple(parents))


def keeps_the_first(proposal: Proposal, draws: list[int]) -> Verdict:
    return walk(Proposal(proposal.tokens[:1], (None,)), [proposal.tokens[0], draws[1]])


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])
def test_trees_of_shared_noise_emit_what_plain_decoding_draws(fault: bool) -> None:
    """For every outcome of the noise of three positions: the emitted tokens are plain decoding's own, one by one.

    So they have its law, exactly, though target and tree were drawn with the same numbers. With the fault, a rule
    that keeps the first sibling unseen, some text differs.
    """
    target, draft = model(1), model(2)
    judge = keeps_the_first if fault else walk
    wrong, rounds = 0, {0: 0, 1: 0, 2: 0}
    every = list(itertools.product(GRID, repeat=VOCAB))
    for first, second in itertools.product(every, every):
        for third in every[::4]:
            noise = (first, second, third)
            plain: list[int] = []
            for position in range(DEPTH + 1):
                plain.append(race(target(tuple(plain)), noise[position])[0])
            tree = sibling_tree(draft, noise)
            draws = [race(target(tuple(path)), noise[len(path)])[0] for path in row_paths(tree)]
            verdict = judge(tree, draws)
            wrong += verdict.tokens(tree) != plain[: len(verdict.path) + 1]
            rounds[len(verdict.path)] += 1
    assert (wrong > 0) == fault
    assert fault or min(rounds.values()) > 0, "some number of accepted drafts was never seen"


OPTIONS: list[dict[str, float | int]] = [
    {"temperature": 1.0},
    {"temperature": 5.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), width=st.sampled_from([8, 50, 5000]))
def test_siblings_in_the_order_of_the_race(
    options: dict[str, float | int], seed: int, count: int, width: int
) -> None:
    """Against the whole race by definition; shares of long rows are of the blocks looked at."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, width, generator=generator) * 3
    params = SamplingParams(**options)  # type: ignore[arg-type]
    prefix = PrefixState([1, 2], params, width, frozenset())
    paths = [[], [3], [3, 4]]
    keys = position_keys(seed, torch.arange(3), Purpose.TARGET)
    ids, shares = leading_tokens(logits, params, prefix, paths, keys, count)
    assert ids[:, 0].tolist() == draw(logits, params, prefix, paths, keys).tolist()
    assert ((shares >= 0) & (shares <= 1)).all() and (shares.diff(dim=1) <= 0).all()
    scores = to_probs(logits, params, prefix, paths).double() / exponential_noise(keys, torch.arange(width))
    for row in range(3):
        order = scores[row].sort(descending=True, stable=True).indices.tolist()
        alive = [i for i, share in zip(ids[row].tolist(), shares[row].tolist(), strict=True) if share > 0]
        assert alive == order[: len(alive)]
        assert len(alive) == min(count, int((scores[row] > 0).sum()))
        wanted = (scores[row] / scores[row].sum())[alive].float()
        if width <= 64 * 32:
            torch.testing.assert_close(shares[row, : len(alive)], wanted, rtol=1e-3, atol=1e-6)


def test_siblings_at_temperature_0() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0], [0.0, -math.inf, 1.0, 9.0], [math.nan] * 4])
    ids, shares = leading_tokens_greedy(logits, 3, 3)
    assert ids[:2, 0].tolist() == greedy_tokens(logits, 3)[0][:2].tolist()
    assert ids[0].tolist() == [1, 2, 0] and ids[1, :2].tolist() == [2, 0]
    torch.testing.assert_close(shares[0], logits[0, :3].softmax(-1).sort(descending=True).values)
    assert shares[1, 2] == 0 and (shares[2] == 0).all()
    params = SamplingParams(logit_bias={0: 5.0})
    prefix = PrefixState([1], params, 3, frozenset())
    keys = torch.zeros(1, dtype=torch.int64)
    ids, _ = leading_tokens(logits[:1], params, prefix, [[]], keys, 2)
    assert ids.tolist() == [[0, 1]]
    with pytest.raises(RequestFailed):
        leading_tokens(logits[2:], params, prefix, [[]], keys, 2)
