"""Trees of drafts: grown best-first, cut to their best nodes, and the contract of a drafter that branches."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from drafter_toys import Loop, table_target
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.proposal import Dense, Proposal
from paceline.decode.draft.cut import best_nodes, cut
from paceline.decode.draft.grow import grow
from paceline.decode.draft.registry import MODEL_FREE, make_model_free
from paceline.decode.draft.suffix import SuffixDrafter, SuffixOptions

chances = st.lists(st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.5]), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(chances, min_size=3, max_size=7),
    depth=st.integers(1, 3),
    size=st.integers(1, 8),
    low=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_growth_takes_the_likeliest_paths(table: list[list[float]], depth: int, size: int, low: float) -> None:
    """Against every path that there is, sorted."""

    def after(path: tuple[int, ...]) -> list[tuple[int, float]]:
        row = table[sum((token + 1) * 3**i for i, token in enumerate(path)) % len(table)]
        return list(enumerate(row))

    every: list[float] = []
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        path, prob = waiting.pop()
        for token, chance in after(path) if len(path) < depth else []:
            if prob * chance >= low:
                every.append(prob * chance)
                waiting.append(((*path, token), prob * chance))
    nodes = grow(after, depth, size, low)
    survival: list[float] = []
    for node in nodes:
        survival.append(node.chance * (1.0 if node.parent is None else survival[node.parent]))
    assert survival == pytest.approx(sorted(every, reverse=True)[:size])
    assert survival == sorted(survival, reverse=True)


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    size = draw(st.integers(0, 7))
    parents = tuple(draw(st.one_of(st.none(), st.integers(0, i - 1))) if i else None for i in range(size))
    confidence = tuple(draw(st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0])) for _ in range(size))
    return Proposal(tuple(range(size)), parents, drafter="d", confidence=confidence)


def survival_of(proposal: Proposal, node: int) -> float:
    assert proposal.confidence is not None
    result = 1.0
    for at in proposal.path_to(node):
        result *= proposal.confidence[at]
    return result


@given(trees(), st.integers(0, 8))
def test_best_nodes_against_every_subset(proposal: Proposal, size: int) -> None:
    """Of all sets of that size closed under parents, one with the most expected accepted tokens."""
    kept = best_nodes(proposal, size)
    assert len(kept) == min(size, len(proposal))
    worth = sum(survival_of(kept, node) for node in range(len(kept)))
    best = 0.0
    for subset in combinations(range(len(proposal)), len(kept)):
        if all(proposal.parents[node] is None or proposal.parents[node] in subset for node in subset):
            best = max(best, sum(survival_of(proposal, node) for node in subset))
    assert worth == pytest.approx(best)
    paths = {tuple(proposal.tokens[at] for at in proposal.path_to(node)) for node in range(len(proposal))}
    assert {tuple(kept.tokens[at] for at in kept.path_to(node)) for node in range(len(kept))} <= paths


def test_best_nodes_of_chains_and_of_trees_without_confidence() -> None:
    chain = Proposal.chain([5, 6, 7], "d", Dense(torch.eye(3)), (0.9, 0.1, 1.0))
    kept = best_nodes(chain, 2)
    assert (kept.tokens, kept.parents, kept.confidence) == ((5, 6), (None, 0), (0.9, 0.1))
    assert isinstance(kept.distribution, Dense) and torch.equal(kept.distribution.probs, torch.eye(3)[:2])
    tree = Proposal((1, 2, 3), (None, None, 1), drafter="d")
    assert best_nodes(tree, 2).tokens == (1, 2) and best_nodes(tree, 3) is tree and not best_nodes(tree, 0).tokens
    assert cut(tree, 1).tokens == (1, 2)


texts = st.lists(st.integers(0, 4), min_size=1, max_size=30)
events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=30)
BRANCHING = [name for name in MODEL_FREE if make_model_free(name).needs.trees]


@pytest.mark.parametrize("name", BRANCHING)
@settings(max_examples=40, deadline=None)
@given(
    table=st.lists(st.integers(0, 4), min_size=5, max_size=25),
    prompts=st.lists(texts, min_size=4, max_size=4),
    what=events,
    size=st.integers(1, 12),
)
def test_contract_with_trees(
    name: str, table: list[int], prompts: list[list[int]], what: list[tuple[int, int, int]], size: int
) -> None:
    """`Loop` checks depth, size, siblings, repeated answers; here: sorted by survival, nothing held at the end."""
    drafter = make_model_free(name)
    loop = Loop(drafter, table_target(table), tree_size=size)
    for kind, key, budget in what:
        if kind == 0 and key in loop.views:
            loop.end(key)
        elif kind == 0:
            loop.begin(key, prompts[key])
        elif loop.views:
            for proposal in loop.round(sorted(loop.views), budget, asked=kind == 1):
                worth = [survival_of(proposal, node) for node in range(len(proposal))]
                assert worth == sorted(worth, reverse=True)
    for key in sorted(loop.views):
        loop.end(key)
    drafter.check_idle()


def test_suffix_branches_where_places_disagree() -> None:
    """ab was followed by c twice and by d once: both stand in the tree, and each with what came after it."""
    text = [1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    loop = Loop(SuffixDrafter(SuffixOptions(min_node_prob=0.05)), lambda prefix: 4, tree_size=5)
    view = loop.begin(0, text)
    (proposal,) = loop.drafter.propose([view], [2])
    paths = {tuple(proposal.tokens[at] for at in proposal.path_to(node)) for node in range(len(proposal))}
    assert paths == {(3,), (4,), (3, 7), (4, 8)}
    loop.end(0)
