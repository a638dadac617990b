"""A proposal made shorter, or smaller."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core.proposal import Dense, Distribution, OneHot, Proposal, Sparse

__all__ = ["best_nodes", "cut"]


def cut(proposal: Proposal, length: int) -> Proposal:
    """`proposal` without what is deeper than `length` tokens; a chain keeps its first `length`.

    Safe under `coupled` and greedy verification whatever the length depends on; under `rejection` and `block`
    the length must not depend on the drafted tokens.
    """
    if proposal.is_chain:
        return _first(proposal, length)
    return _keep(proposal, [node for node, depth in enumerate(proposal.depths()) if depth <= length])


def best_nodes(proposal: Proposal, size: int) -> Proposal:
    """The `size` nodes that are most likely accepted, by the product of `confidence` on their paths.

    Still a tree, its nodes in their old order: no path is likelier than the one it goes on from, and among equals
    the first are kept. A chain keeps its first `size`, as does a tree without confidence. Safe under `coupled` and
    greedy verification; under `rejection` and `block` for chains and for trees whose confidence does not depend
    on what was drawn.
    """
    if size >= len(proposal):
        return proposal
    survival: list[float] = []
    for parent, own in zip(proposal.parents, proposal.confidence or [1.0] * len(proposal), strict=True):
        survival.append(own if parent is None else min(own, 1.0) * survival[parent])
    ranked = sorted(range(len(proposal)), key=lambda node: -survival[node])
    return _keep(proposal, sorted(ranked[: max(size, 0)]))


def _first(proposal: Proposal, length: int) -> Proposal:
    """The first `length` of a chain."""
    if length >= len(proposal.tokens):
        return proposal
    if length <= 0:
        return Proposal()
    confidence, distribution = proposal.confidence, proposal.distribution
    return Proposal.chain(
        proposal.tokens[:length],
        proposal.drafter,
        distribution if isinstance(distribution, OneHot) else _rows(distribution, range(length)),
        None if confidence is None else confidence[:length],
    )


def _keep(proposal: Proposal, kept: Seq[int]) -> Proposal:
    """The nodes `kept`, rising, each with its parent."""
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


def _rows(distribution: Distribution, kept: Seq[int]) -> Distribution:
    match distribution:
        case OneHot():
            return distribution
        case Dense(probs):
            return Dense(probs[list(kept)])
        case Sparse(ids, probs):
            return Sparse(ids[list(kept)], probs[list(kept)])
