"""A proposal made shorter, or smaller."""

from __future__ import annotations

from paceline.core.proposal import Dense, Distribution, OneHot, Proposal, Sparse

__all__ = ["cut", "first_nodes"]


def cut(proposal: Proposal, length: int) -> Proposal:
    """`proposal` without what is deeper than `length` tokens; a chain keeps its first `length`.

    Safe under `coupled` and greedy verification whatever the length depends on; under `rejection` and `block`
    the length must not depend on the drafted tokens.
    """
    return _keep(proposal, [node for node, depth in enumerate(proposal.depths()) if depth <= length])


def first_nodes(proposal: Proposal, count: int) -> Proposal:
    """The first `count` nodes of `proposal`: still a tree, for parents come before their children."""
    return _keep(proposal, list(range(min(count, len(proposal)))))


def _keep(proposal: Proposal, kept: list[int]) -> Proposal:
    if len(kept) == len(proposal):
        return proposal
    if not kept:
        return Proposal()
    position = {node: i for i, node in enumerate(kept)}
    parents = [proposal.parents[node] for node in kept]
    confidence = proposal.confidence
    return Proposal(
        tuple(proposal.tokens[node] for node in kept),
        tuple(None if parent is None else position[parent] for parent in parents),
        _rows(proposal.distribution, kept),
        proposal.drafter,
        None if confidence is None else tuple(confidence[node] for node in kept),
    )


def _rows(distribution: Distribution, kept: list[int]) -> Distribution:
    match distribution:
        case OneHot():
            return distribution
        case Dense(probs):
            return Dense(probs[kept])
        case Sparse(ids, probs):
            return Sparse(ids[kept], probs[kept])
