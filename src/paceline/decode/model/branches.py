"""How a tree of drafts lies in the cache, and in which order its branches are looked at.

A kernel sums over keys by their place, so a row keeps the bits it has in plain decoding only where every key it
sees lies at its own position. In a tree several tokens want one position. So the deepest path, the trunk, lies
where a chain would; every other row has a place behind it. Before a branch is attended to, its rows are put at
their positions for that one attention call, and the trunk is put back before its own. The accepted path needs
no move where it follows the trunk.

Branches are taken in the order of their depth, deepest parting first: what one of them overwrites lies below the
parting of every later one, or is overwritten by it too.
Twin: `tests/engine/test_branches.py` writes every path out alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Branch", "TreeLayout", "lay_out"]


@dataclass(frozen=True, slots=True)
class Branch:
    """path   rows from the parting to the leaf, put at their positions for this branch
    rows   those of them that no earlier branch has attended for
    """

    path: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Of a tree with n rows, row 0 its root:

    depths     [n] distance from the root, also the row's position
    places     [n] where each row's keys and values lie between passes; places and positions count from the root's
    trunk      rows of the deepest path, root first
    branches   the others, in the order in which they must be attended to
    replaced   trunk rows that some branch overwrites
    """

    depths: tuple[int, ...]
    places: tuple[int, ...]
    trunk: tuple[int, ...]
    branches: tuple[Branch, ...]
    replaced: tuple[int, ...]


def lay_out(
    parents: Sequence[int],  # row that each row follows, -1 for row 0; parents come before their children
) -> TreeLayout:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    trunk = _path(parents, depths.index(max(depths)))
    places = [-1] * len(parents)
    for place, row in enumerate(trunk):
        places[row] = place
    free = len(trunk)
    for row, place in enumerate(places):
        if place < 0:
            places[row], free = free, free + 1
    inner = set(parents)
    leaves = [row for row in range(len(parents)) if row not in inner and row != trunk[-1]]
    paths = [[row for row in _path(parents, leaf) if places[row] >= len(trunk)] for leaf in leaves]
    paths.sort(key=lambda path: -depths[path[0]])
    branches, done = [], set(trunk)
    for path in paths:
        branches.append(Branch(tuple(path), tuple(row for row in path if row not in done)))
        done.update(path)
    first = min((depths[path[0]] for path in paths), default=len(trunk))
    return TreeLayout(tuple(depths), tuple(places), tuple(trunk), tuple(branches), tuple(trunk[first:]))


def _path(parents: Sequence[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
