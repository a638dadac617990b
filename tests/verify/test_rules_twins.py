"""`rejection`, `block` and `relaxed` on tensors against slow twins, for proposals of any shape and distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import verify_twins as twins
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.proposal import Dense, OneHot, Proposal, Sparse
from paceline.decode.verify.block import verify_block
from paceline.decode.verify.chances import RoundNoise
from paceline.decode.verify.leniency import Leniency, TopWithin, Typical, check_leniency, parse_leniency
from paceline.decode.verify.noise import request_key
from paceline.decode.verify.rejection import verify_rejection
from paceline.decode.verify.relaxed import verify_relaxed
from paceline.errors import InvalidParameter

VOCAB = 6


def distributions(rng: np.random.Generator, rows: int, width: int = VOCAB) -> np.ndarray:
    """Rows with zeros and small entries, float32 as `to_probs` gives them."""
    weights = rng.integers(0, 4, (rows, width)) * 10.0 ** rng.integers(-3, 1, (rows, width))
    weights[np.arange(rows), rng.integers(width, size=rows)] += 1.0
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def proposal_of(rng: np.random.Generator, parents: list[int | None], form: str) -> tuple[Proposal, np.ndarray]:
    """Tokens that their rows allow, and those rows over the target's ids; a wider or narrower draft is cut, padded."""
    width = int(rng.integers(VOCAB - 1, VOCAB + 2))
    rows = distributions(rng, len(parents), width)
    rows[:, VOCAB:] = 0
    rows[:, 0] += 1e-3
    rows /= rows.sum(1, keepdims=True)
    tokens = [int(rng.choice(width, p=row.astype(float) / row.astype(float).sum())) for row in rows]
    if form == "one-hot":
        rows = np.eye(VOCAB, dtype=np.float32)[tokens]
        return Proposal(tuple(tokens), tuple(parents), OneHot()), rows.reshape(-1, VOCAB)
    whole = np.zeros((len(parents), VOCAB), dtype=np.float32)
    whole[:, : min(width, VOCAB)] = rows[:, :VOCAB]
    ids = np.stack([rng.permutation(VOCAB) for _ in parents]) if parents else np.zeros((0, VOCAB), dtype=np.int64)
    sparse = Sparse(torch.from_numpy(ids), torch.from_numpy(np.take_along_axis(whole, ids, 1)))
    dense = Dense(torch.from_numpy(rows))
    return Proposal(tuple(tokens), tuple(parents), dense if form == "dense" else sparse), whole


@st.composite
def shapes(draw: st.DrawFn) -> list[int | None]:
    size = draw(st.integers(0, 7))
    return [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(size)]


def possible(proposal: Proposal, draft: np.ndarray) -> bool:
    """Whether each sibling could have been drawn after the ones before it, or repeats one."""
    for node, parent in enumerate(proposal.parents):
        before = [proposal.tokens[n] for n in range(node) if proposal.parents[n] == parent]
        if proposal.tokens[node] not in before and draft[node][proposal.tokens[node]] <= 0:
            return False
    return True


FORMS = st.sampled_from(["dense", "sparse", "one-hot"])


@settings(max_examples=150, deadline=None)
@given(shapes(), FORMS, st.integers(0, 10**6))
def test_rejection_equals_its_twin(parents: list[int | None], form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposal, draft = proposal_of(rng, parents, form)
    assert possible(proposal, draft)
    target, key = distributions(rng, 1 + len(parents)).astype(float), request_key(seed, 1)
    verdict = verify_rejection(proposal, torch.from_numpy(target), RoundNoise(key, 9))
    path, token = twins.rejection(proposal, target, draft.astype(float), np.uint64(key % 2**64), 9)
    assert (list(verdict.path), verdict.next_token) == (path, token)
    assert (verdict.kind == "bonus") == ((path[-1] if path else None) not in proposal.parents)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 7), FORMS, st.integers(0, 10**6))
def test_block_equals_its_twin(length: int, form: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposal, draft = proposal_of(rng, [None, *range(length - 1)][:length], form)
    target, key = distributions(rng, 1 + length).astype(float), request_key(seed, 1)
    verdict = verify_block(proposal, torch.from_numpy(target), RoundNoise(key, 9))
    kept, token = twins.block(proposal.tokens, target, draft.astype(float), np.uint64(key % 2**64), 9)
    assert (list(verdict.path), verdict.next_token) == (list(range(kept)), token)
    assert (verdict.kind == "bonus") == (kept == length)


def enough(leniency: Leniency, row: np.ndarray, token: int) -> bool:
    if isinstance(leniency, TopWithin):
        ranked = sorted(row.tolist(), reverse=True)
        last = ranked[min(leniency.count, len(ranked)) - 1]
        return bool(row[token] > 0 and row[token] >= last and row[token] >= ranked[0] - leniency.margin)
    entropy = -math.fsum(x * math.log(x) for x in row.tolist() if x > 0)
    return bool(row[token] > min(leniency.epsilon, leniency.delta * math.exp(-entropy)))


@settings(max_examples=150, deadline=None)
@given(
    shapes(),
    st.builds(Typical, st.floats(0.01, 1.0), st.floats(0.0, 2.0))
    | st.builds(TopWithin, st.integers(1, 4), st.floats(0.0, 0.9)),
    st.integers(0, 10**6),
)
def test_relaxed_equals_its_twin(parents: list[int | None], leniency: Leniency, seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposal, _ = proposal_of(rng, parents, "one-hot")
    target = distributions(rng, 1 + len(parents)).astype(float)
    draws = [int(rng.choice(VOCAB, p=row / row.sum())) for row in target]
    verdict = verify_relaxed(proposal, torch.from_numpy(target), draws, leniency)
    path, token = twins.relaxed(proposal, target, draws, lambda row, t: enough(leniency, row, t))
    assert (list(verdict.path), verdict.next_token) == (path, token)


def test_block_is_for_chains() -> None:
    with pytest.raises(AssertionError, match="for chains"):
        verify_block(Proposal((0, 1), (None, None)), torch.ones(3, 2) / 2, RoundNoise(1, 0))


def test_a_drafter_that_says_its_draft_was_impossible_is_caught() -> None:
    proposal = Proposal.chain([1], "liar", Dense(torch.tensor([[1.0, 0.0]])))
    for rule in (verify_rejection, verify_block):
        with pytest.raises(AssertionError, match="liar drew token 1"):
            rule(proposal, torch.full((2, 2), 0.5, dtype=torch.float64), RoundNoise(1, 0))


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("typical", Typical()),
        ("typical:0.2,0.5", Typical(0.2, 0.5)),
        ("top:10,0.6", TopWithin(10, 0.6)),
    ],
)
def test_leniency_as_text(text: str, means: Leniency) -> None:
    assert parse_leniency(text) == means and parse_leniency(str(means)) == means
    check_leniency("relaxed", means)


REFUSED = """
    loose top top: top:3 top:3,1 top:0,0.5 top:2.5,0.1 TOP:3,0.1 top:2,-0.1 top:2,nan typical: typical:0,1 typical:2,1
    typical:0.1 typical:0.1,-1 typical:nan,0.1 typical:0.1,inf typical:0.1,0.2,0.3
"""


@pytest.mark.parametrize("text", ["", *REFUSED.split()])
def test_leniency_that_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="relaxed"):
        parse_leniency(text)


def test_greedy_rows_leave_nothing_to_relax() -> None:
    row = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    proposal = Proposal.chain([1, 0], "toy")
    for leniency in (Typical(), TopWithin(3, 0.99)):
        verdict = verify_relaxed(proposal, [row, row, row], [1, 1, 1], leniency)
        assert verdict.tokens(proposal) == [1, 1]
