"""Walks, `greedy` and `coupled`: against their twins, and proved lossless by exact enumeration.

The enumeration is in rational numbers. With noise shared by target and drafter, the chance that the target
draws i while the drafter draws j has a closed form (`shared_law`): the race of exponentials seen by both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import verify_twins as twins
from enumeration import Law, Models, Row, extend, row_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.verify.coupled import verify_coupled
from paceline.decode.verify.greedy import verify_greedy
from paceline.decode.verify.noise import Purpose, exponential_noise, position_keys
from paceline.decode.verify.rules import RULES, get_rule, row_paths, row_positions, walk
from paceline.errors import UsageError


@st.composite
def proposals(draw: st.DrawFn, vocab: int = 4) -> Proposal:
    size = draw(st.integers(0, 9))
    tokens = tuple(draw(st.integers(0, vocab - 1)) for _ in range(size))
    parents = tuple(draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(size))
    return Proposal(tokens, parents)


@given(proposals(), st.data())
def test_walk_equals_its_twin(proposal: Proposal, data: st.DataObject) -> None:
    draws = [data.draw(st.integers(0, 3)) for _ in range(1 + len(proposal))]
    path, next_token, leaf = twins.walk(proposal, draws)
    assert walk(proposal, draws) == Verdict(tuple(path), next_token, "bonus" if leaf else "recovered")


@given(proposals())
def test_rows_lie_where_their_paths_say(proposal: Proposal) -> None:
    paths = row_paths(proposal)
    assert paths[0] == []
    for node in range(len(proposal)):
        assert paths[1 + node] == [proposal.tokens[n] for n in proposal.path_to(node)]
    assert row_positions(proposal, 10) == [10 + len(path) for path in paths]


def test_equal_siblings_first_wins() -> None:
    proposal = Proposal((5, 5, 6, 7), (None, None, 0, 1))
    assert walk(proposal, [5, 7, 9, 9, 9]) == Verdict((0,), 7, "recovered")
    assert walk(proposal, [5, 6, 9, 8, 9]) == Verdict((0, 2), 8, "bonus")


def test_a_walk_needs_a_draw_for_each_row() -> None:
    with pytest.raises(AssertionError, match="2 draws"):
        walk(Proposal(), [1, 2])


@settings(max_examples=50)
@given(proposals(vocab=40), st.integers(0, 10**6))
def test_rules_equal_their_twins(proposal: Proposal, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(1 + len(proposal), 40, generator=generator).pow(8)
    probs[:, 3] = 0
    probs /= probs.sum(-1, keepdim=True)
    before = probs.clone()
    greedy = [max(range(40), key=lambda i: (row[i].item(), -i)) for row in probs]
    assert verify_greedy(proposal, probs) == walk(proposal, greedy)
    keys = position_keys(seed, torch.tensor(row_positions(proposal, 7)), Purpose.TARGET)
    slow = [
        twins.draw(row.numpy().astype(float), np.uint64(key.item() % 2**64))[0]
        for row, key in zip(probs, keys, strict=True)
    ]
    assert verify_coupled(proposal, probs, keys) == walk(proposal, slow)
    assert torch.equal(probs, before)


def test_rules_are_named_and_unknown_ones_refused() -> None:
    assert [rule.name for rule in RULES.values() if not rule.lossless] == ["relaxed"]
    with pytest.raises(UsageError, match="'typical'; allowed: coupled, greedy, rejection, block, relaxed"):
        get_rule("typical")


# Exact enumeration ------------------------------------------------------------------------------------------


def shared_law(p: Row, q: Row) -> dict[tuple[int, int], Fraction]:
    """P(argmin E/p = i and argmin E/q = j) for the same E ~ Exp(1).

    With E_j = r E_i the two win iff every other E_k exceeds E_i max(p_k/p_i, r q_k/q_j), and r lies between
    p_j/p_i and q_j/q_i; over E_i that is the integral of (1 + r + sum of maxima)^-2 over r, linear in pieces.
    """
    law: dict[tuple[int, int], Fraction] = {}
    everyone = range(len(p))
    for i, j in itertools.product(everyone, everyone):
        if p[i] == 0 or q[j] == 0:
            continue
        if i == j:
            law[i, j] = 1 / sum((max(p[k] / p[i], q[k] / q[i]) for k in everyone), Fraction(0))
            continue
        others = [k for k in everyone if k not in (i, j)]
        low, high = p[j] / p[i], (q[j] / q[i] if q[i] > 0 else None)
        if high is not None and low >= high:
            continue
        kinks = {p[k] * q[j] / (p[i] * q[k]) for k in others if q[k] > 0}
        inner = sorted(r for r in kinks if low < r and (high is None or r < high))
        total = Fraction(0)
        for a, b in itertools.pairwise([low, *inner, high]):
            middle = a + 1 if b is None else (a + b) / 2
            constant, slope = Fraction(1), Fraction(1)
            for k in others:
                if p[k] / p[i] >= middle * q[k] / q[j]:
                    constant += p[k] / p[i]
                else:
                    slope += q[k] / q[j]
            total += (1 / (constant + slope * a) - (0 if b is None else 1 / (constant + slope * b))) / slope
        law[i, j] = total
    return law


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=4))
def test_the_shared_law_has_both_marginals(weights: list[tuple[int, int]]) -> None:
    left, right = [a for a, _ in weights], [b for _, b in weights]
    if sum(left) == 0 or sum(right) == 0:
        return
    p, q = row_of(left), row_of(right)
    law = shared_law(p, q)
    for i in range(len(p)):
        assert sum((w for (a, _), w in law.items() if a == i), Fraction(0)) == p[i]
        assert sum((w for (_, b), w in law.items() if b == i), Fraction(0)) == q[i]


def test_the_shared_law_is_that_of_the_noise() -> None:
    """100,000 draws, 9 cells; fails below p = 1e-4."""
    from scipy import stats

    p, q = row_of([1, 6, 3]), row_of([3, 3, 4])
    noise = exponential_noise(position_keys(1, torch.arange(100_000), Purpose.TARGET), torch.arange(3))
    first = (noise / torch.tensor([float(x) for x in p])).argmin(-1)
    second = (noise / torch.tensor([float(x) for x in q])).argmin(-1)
    counts = np.bincount((first * 3 + second).numpy(), minlength=9)
    law = np.array([float(shared_law(p, q).get((i, j), 0)) for i in range(3) for j in range(3)])
    seen = law > 0
    assert counts[~seen].sum() == 0
    assert stats.chisquare(counts[seen], law[seen] * 100_000).pvalue > 1e-4


Judge = Callable[[Proposal, list[int]], Verdict]


def chain_round(models: Models, draft_length: int, judge: Judge) -> Law:
    """The law of what one round emits when the drafter draws each token with the position's own noise.

    Rows of the target lie on the drafts' path also past the first disagreement, so each position has one pair
    (target draw, draft) of the shared law.
    """
    law: Law = defaultdict(Fraction)

    def grow(drafts: tuple[int, ...], draws: tuple[int, ...], weight: Fraction) -> None:
        p = models.row("target", drafts)
        if len(drafts) == draft_length:
            proposal = Proposal.chain(drafts, "enumerated")
            for token, chance in enumerate(p):
                if chance > 0:
                    emitted = judge(proposal, [*draws, token]).tokens(proposal)
                    law[tuple(emitted)] += weight * chance
            return
        for (draw, draft), chance in shared_law(p, models.row("drafter", drafts)).items():
            if chance > 0:
                grow((*drafts, draft), (*draws, draw), weight * chance)

    grow((), (), Fraction(1))
    return dict(law)


def tree_round(models: Models, proposal: Proposal, judge: Judge) -> Law:
    """The law of one round for a given tree. Rows of one depth share their noise."""
    law: Law = defaultdict(Fraction)
    paths = [tuple(path) for path in row_paths(proposal)]
    rows = [models.row("target", path) for path in paths]
    for draws in itertools.product(range(models.vocab), repeat=len(rows)):
        # Only rows on the path that is followed matter, one a depth, so shared noise drops out: each
        # path is counted once, with the draws of the rows beside it fixed to 0.
        verdict = judge(proposal, list(draws))
        on_path = {0, *(1 + node for node in verdict.path)}
        if any(draw != 0 for row, draw in enumerate(draws) if row not in on_path):
            continue
        weight = Fraction(1)
        for row in on_path:
            weight *= rows[row][draws[row]]
        if weight:
            law[tuple(verdict.tokens(proposal))] += weight
    return dict(law)


def keeps_the_first_draft(proposal: Proposal, draws: list[int]) -> Verdict:
    """Injected fault: the first draft is kept whatever the target drew."""
    return Verdict((0,), draws[1], "recovered") if len(proposal) else walk(proposal, draws)


@pytest.mark.parametrize("draft_length", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fault", [False, True])
def test_a_round_of_a_coupled_chain_is_lossless(draft_length: int, seed: int, fault: bool) -> None:
    models = Models(vocab=3 if draft_length < 3 else 2, seed=seed)
    law = chain_round(models, draft_length, keeps_the_first_draft if fault else walk)
    assert sum(law.values()) == 1
    same = extend(models, law, 1 + draft_length) == models.target_law(1 + draft_length)
    assert same or (fault and draft_length > 0)
    if fault and draft_length > 0:
        assert not same


TREES = [
    Proposal((0, 1), (None, None)),
    Proposal((0, 0), (None, None)),
    Proposal((0, 1, 0, 1), (None, None, 0, 0)),
    Proposal((1, 1, 0, 1), (None, None, 0, 1)),
    Proposal((1, 0, 1, 0, 1), (None, 0, 1, None, 3)),
]


@pytest.mark.parametrize("proposal", TREES)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("fault", [False, True])
def test_a_round_of_a_tree_is_lossless(proposal: Proposal, seed: int, fault: bool) -> None:
    models = Models(vocab=3, seed=seed)
    law = tree_round(models, proposal, keeps_the_first_draft if fault else walk)
    length = 1 + max(proposal.depths())
    same = sum(law.values()) == 1 and extend(models, law, length) == models.target_law(length)
    assert same is not fault


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=3), st.integers(0, 10**6))
def test_any_fixed_chain_is_lossless(tokens: list[int], seed: int) -> None:
    models = Models(vocab=3, seed=seed)
    law = tree_round(models, Proposal.chain(tokens, "given"), walk)
    assert extend(models, law, 1 + len(tokens)) == models.target_law(1 + len(tokens))
