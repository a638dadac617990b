"""Tree shapes by Sequoia's dynamic program (arXiv 2402.12374), and the tree that pays best on this machine.

`ranks[r]` is the chance that the r-th ranked child of an accepted node is the accepted one (its siblings are
exclusive, so they sum to at most 1). F(m, l) = expected tokens of the best tree with m nodes, the root (the
target's own token) included, and at most l levels below it:

    F(m, l) = max over b of T(m, l, b);   T(1, l, 0) = 1
    T(m, l, b) = max over y of T(y, l, b-1) + ranks[b-1] * F(m-y, l-1)

Ranks fall (children are ranked), and then growing by the largest path product gives the same values (a test
holds both to each other).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter

__all__ = ["TreeChoice", "best_tree", "grow_tree", "tree_values"]

Array = npt.NDArray[np.float64]


def _check(ranks: Sequence[float]) -> None:
    falls = all(a >= b for a, b in itertools.pairwise(ranks))
    bad = not ranks or any(not 0 <= p <= 1 for p in ranks) or sum(ranks) > 1 + 1e-9 or not falls
    if bad:
        raise InvalidParameter(
            "acceptance by rank", tuple(ranks), "falling numbers from 0 to 1 that sum to at most 1"
        )


def tree_values(ranks: Sequence[float], nodes: int, levels: int) -> Array:
    """F [nodes + 1, levels + 1]: expected tokens of the best tree with m nodes and at most l levels; F[0] is
    0.
    """
    _check(ranks)
    if nodes < 1 or levels < 0:
        raise InvalidParameter("tree", (nodes, levels), "at least one node and no negative depth")
    best = np.zeros((nodes + 1, levels + 1))
    best[1, :] = 1.0
    best[1:, 0] = 1.0  # without levels the root is all there is
    for level in range(1, levels + 1):
        # table[m] = best with the children so far; a further child of y nodes adds its rank's share.
        table = np.full(nodes + 1, -np.inf)
        table[1] = 1.0
        best[1:, level] = np.maximum(best[1:, level], table[1:])
        for p in ranks:
            grown = table.copy()
            for m in range(2, nodes + 1):
                y = np.arange(1, m)
                grown[m] = max(grown[m], float(np.max(table[y] + p * best[m - y, level - 1])))
            table = grown
        best[:, level] = np.maximum(np.maximum.accumulate(np.maximum(table, 0.0)), best[:, level])
        best[1, level] = 1.0
    return best


def grow_tree(ranks: Sequence[float], nodes: int, levels: int) -> tuple[float, list[int | None]]:
    """(expected tokens, parents) of the tree grown node by node, always where the path product is largest.

    `parents` lists drafted nodes as a `Proposal` does: None hangs on the last committed token.
    """
    _check(ranks)
    parents: list[int | None] = []
    value = 1.0
    # (path product, depth, parent, rank) of every node that could come next
    open_nodes: list[tuple[float, int, int | None, int]] = [(ranks[0], 1, None, 0)] if levels else []
    while open_nodes and len(parents) < nodes - 1:
        chosen = max(open_nodes, key=lambda n: n[0])
        open_nodes.remove(chosen)
        product, depth, parent, rank = chosen
        parents.append(parent)
        value += product
        if rank + 1 < len(ranks) and ranks[rank] > 0:
            open_nodes.append((product / ranks[rank] * ranks[rank + 1], depth, parent, rank + 1))
        if depth < levels:
            open_nodes.append((product * ranks[0], depth + 1, len(parents) - 1, 0))
    return value, parents


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """Nodes (root included) and depth of the tree that pays best, and what it brings."""

    nodes: int
    depth: int
    tokens: float
    tokens_per_s: float


def best_tree(
    ranks: Sequence[float],
    draft_step_s: float,
    verify_s: Callable[[int], float],  # nodes, the root included -> seconds of the target's pass
    most_nodes: int,
    most_levels: int,
) -> TreeChoice:
    """Maximises F(m, d) / (d * draft_step + verify(m)); depth 0 is plain decoding."""
    values = tree_values(ranks, most_nodes, most_levels)
    best = TreeChoice(1, 0, 1.0, 1.0 / verify_s(1))
    for nodes in range(2, most_nodes + 1):
        cost = verify_s(nodes)
        for depth in range(1, most_levels + 1):
            rate = float(values[nodes, depth]) / (depth * draft_step_s + cost)
            if rate > best.tokens_per_s:
                best = TreeChoice(nodes, depth, float(values[nodes, depth]), rate)
    return best
