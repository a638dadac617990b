"""A tree grown best-first: always the most probable continuation that is not in it yet.

A node is worth the chance that it is accepted, the product of the chances on its path, which falls from parent to
child; so the first `size` nodes in this order are the best set of that size (OPT-Tree, arXiv 2406.17276; EAGLE-2,
arXiv 2406.16858, for the product of confidences).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["Node", "grow"]


class Node(NamedTuple):
    """A token after node `parent` (None: the last committed token), and its chance once that was accepted."""

    token: int
    parent: int | None
    chance: float


Continue = Callable[[tuple[int, ...]], Iterable[tuple[int, float]]]


def grow(
    after: Continue,  # drafts on the path -> (token, chance) of what may follow, in an order that settles ties
    depth: int,
    size: int,
    min_prob: float,  # nodes whose path is less probable are left out, in [0, 1)
) -> list[Node]:
    """Up to `size` nodes on paths of up to `depth`, most probable path first."""
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, Node]] = []
    count = 0

    def offer(path: tuple[int, ...], parent: int | None, path_prob: float) -> None:
        nonlocal count
        for token, chance in after(path) if len(path) < depth else ():
            if path_prob * chance >= min_prob:
                heapq.heappush(waiting, (-path_prob * chance, count, Node(token, parent, chance)))
                count += 1

    offer((), None, 1.0)
    while waiting and len(nodes) < size:
        negative, _, node = heapq.heappop(waiting)
        path = (*(paths[node.parent] if node.parent is not None else ()), node.token)
        nodes.append(node)
        paths.append(path)
        if len(nodes) < size:
            offer(path, len(nodes) - 1, -negative)
    return nodes
