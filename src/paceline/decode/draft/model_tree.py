"""Trees of a draft model, grown level by level: one pass a level, over every node worth going on from.

The siblings after a node are the first tokens of the race that decides its draw: of E / p under `coupled`, with the
noise E of the position that the target will use too, and of p at temperature 0. The first is the token that a chain
would hold; the others come next to winning, so they win where the target thinks a little differently. Their chances
are their shares in the sum of p / E (of p at temperature 0): what each would have of winning if the target's
log-probabilities lay about the draft's with Gumbel noise of scale 1. That the noise is shared cannot bias the text:
the target's draw does not look at the tree, which only decides how much of it is found (`verify/rules.py`).

A tree holds the `size` most probable nodes by the product of chances on their paths. It shrinks from parent to child,
so a node that falls out of the best stays out with all that hangs on it, and D passes find the best tree of depth D.

Under a rule that tests drafts against what they were drawn from (`rejection`) a tree's shape must not depend on what
is drawn. There it is laid down beforehand (`ShapedTree`), by what siblings are worth on the whole; the siblings of a
node are drawn without replacement, the first of a race of the drafts' own noise, and each says what it was drawn from.

The rows of a tree lie in the cache behind the committed ones, in the order they were run; of the path that was
committed they are kept, the rest is forgotten (`WrittenTree`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache as remember

import torch
from torch import Tensor

from paceline.core.proposal import Dense, Distribution, OneHot, Proposal
from paceline.decode.cache import KVCache
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.draws import draft_key, reports_probs
from paceline.decode.draft.grow import Node, grow
from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Level, Span, build_inputs
from paceline.decode.verify.probabilities import is_plain_greedy, leading_tokens, leading_tokens_greedy, to_probs
from paceline.errors import RequestFailed

__all__ = ["GrowingTree", "ShapedTree", "WrittenTree", "grow_trees", "new_tree"]

# Chance that the target takes the first sibling, the second given not the first, ... of a drawn tree: a shape is
# laid down before anything is known of its nodes. Any numbers are exact; these only say how broad trees are.
_SIBLING_CHANCES = (0.6, 0.15, 0.06, 0.03, 0.02, 0.01)


@dataclass(slots=True)
class WrittenTree:
    """Rows behind the committed ones of a slot: the token of each and the row it follows, None for the first level."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)

    def path(self, following: Seq[int]) -> list[int]:
        """The rows that hold `following`, as far as they go."""
        path: list[int] = []
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            last = path[-1] if path else None
            if len(path) < len(following) and parent == last and token == following[len(path)]:
                path.append(row)
        return path

    def keep(self, cache: KVCache, slot: int, following: Seq[int]) -> list[int]:
        """Commits the rows that hold the tokens `following`; returns those tokens."""
        path = self.path(following)
        if path:
            with cache.transaction() as transaction:
                transaction.reserve(slot, len(self.tokens))
                transaction.commit(slot, path)
        return [self.tokens[row] for row in path]


@dataclass(slots=True)
class GrowingTree:
    """One sequence while its tree grows. Nodes are numbered in the order they were found, parents first.

    base     tokens the draft has read before the tree
    depth    tokens on the longest path at most
    size     nodes at most
    limit    tokens the sequence may grow to, for the rotation
    ends     tokens behind which nothing can follow
    row_of   node -> its row among those written, for nodes that were run
    """

    view: SequenceView
    slot: int
    base: int
    depth: int
    size: int
    limit: int
    ends: frozenset[int]
    written: WrittenTree = field(default_factory=WrittenTree)
    tokens: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)

    def add(
        self, parent: int | None, tokens: Seq[int], chances: Seq[float], drawn_from: Tensor | None = None
    ) -> None:
        """Children of a node, likeliest first; those that cannot be among the best are left out."""
        above = 1.0 if parent is None else self.survival[parent]
        least = self.survival[self.best[-1]] if len(self.best) == self.size else 0.0
        for token, chance in zip(tokens, chances, strict=True):
            if above * chance <= least:
                break
            self._append(parent, token, chance)

    def _append(self, parent: int | None, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.survival.append(chance if parent is None else self.survival[parent] * chance)
        self.depths.append(1 if parent is None else self.depths[parent] + 1)

    def choose(self) -> None:
        """Settles which nodes are the best, likeliest first; a parent stands before its children."""
        self.best = sorted(range(len(self.tokens)), key=lambda node: -self.survival[node])[: self.size]

    def frontier(self, depth: int, room: int) -> list[int]:
        """The best nodes of that depth, as far as something can follow and there are rows for them."""
        if depth >= self.depth:
            return []
        free = max(0, room - len(self.written.tokens))
        return [n for n in self.best if self.depths[n] == depth and self.tokens[n] not in self.ends][:free]

    def path(self, node: int | None) -> list[int]:
        """Nodes from the first draft to `node`, both included."""
        path: list[int] = []
        while node is not None:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def level(self, nodes: Seq[int]) -> Span:
        """The pass over `nodes`, all of one depth; notes where they will lie."""
        base = self.base
        above = [[base + self.row_of[at] for at in self.path(self.parents[node])] for node in nodes]
        start = base + len(self.written.tokens)
        for node in nodes:
            self.row_of[node] = len(self.written.tokens)
            parent = self.parents[node]
            self.written.tokens.append(self.tokens[node])
            self.written.parents.append(None if parent is None else self.row_of[parent])
        tokens = [self.tokens[node] for node in nodes]
        return Span(self.slot, start, tokens, limit=self.limit, level=Level(base, above))

    def proposal(self, name: str) -> Proposal:
        """The best nodes, likeliest first. They were certain once the logits and the noise were."""
        if not self.best:
            return Proposal()
        place = {node: i for i, node in enumerate(self.best)}
        parents = (self.parents[node] for node in self.best)
        return Proposal(
            tuple(self.tokens[node] for node in self.best),
            tuple(None if parent is None else place[parent] for parent in parents),
            self.distribution(),
            name,
            tuple(self.chances[node] for node in self.best),
        )

    def distribution(self) -> Distribution:
        return OneHot()


@dataclass(slots=True)
class ShapedTree(GrowingTree):
    """A tree whose shape is known before its tokens: node i of `shape` takes sibling number `shape[i].token`.

    Where fewer tokens can be drawn than a node has siblings, the last ones and what hangs on them are left out.
    """

    shape: Seq[Node] = ()
    shape_of: list[int] = field(default_factory=list)  # node -> its place in the shape
    rows: list[Tensor] = field(default_factory=list)  # node -> what it was drawn from [vocab]

    def add(
        self, parent: int | None, tokens: Seq[int], chances: Seq[float], drawn_from: Tensor | None = None
    ) -> None:
        assert drawn_from is not None, "a drawn tree says what it was drawn from"
        place = None if parent is None else self.shape_of[parent]
        children = [i for i, node in enumerate(self.shape) if node.parent == place]
        for i, token, chance in zip(children, tokens, chances, strict=False):
            if chance <= 0:
                break
            self._append(parent, token, self.shape[i].chance)
            self.shape_of.append(i)
            self.rows.append(drawn_from)

    def choose(self) -> None:
        self.best = list(range(len(self.tokens)))

    def frontier(self, depth: int, room: int) -> list[int]:
        inner = {node.parent for node in self.shape}
        return [n for n in GrowingTree.frontier(self, depth, room) if self.shape_of[n] in inner]

    def distribution(self) -> Distribution:
        return Dense(torch.stack(self.rows))


def new_tree(
    view: SequenceView, slot: int, base: int, depth: int, size: int, limit: int, ends: frozenset[int]
) -> GrowingTree:
    """The kind of tree that the request's rule asks for."""
    if reports_probs(view):
        return ShapedTree(view, slot, base, depth, size, limit, ends, shape=_shape(depth, size))
    return GrowingTree(view, slot, base, depth, size, limit, ends)


@remember
def _shape(depth: int, size: int) -> tuple[Node, ...]:
    return tuple(grow(lambda path: enumerate(_SIBLING_CHANCES), depth, size, 0.0))


def grow_trees(
    model: TargetModel,
    cache: KVCache,
    trees: Seq[GrowingTree],
    logits: Tensor,  # [trees, width] after the last committed token of each
) -> None:
    """Grows every tree to its depth, all of them in one pass a level."""
    found: list[tuple[GrowingTree, list[int | None]]] = [(tree, [None]) for tree in trees]
    depth = 0
    while found:
        _branch(found, logits)
        depth += 1
        going = []
        for tree, _ in found:
            tree.choose()
            room = min(cache.granted(tree.slot) - tree.base, cache.largest_write)
            if nodes := tree.frontier(depth, room):
                going.append((tree, nodes))
        if going:
            logits = _run(model, cache, going)
        found = [(tree, list(nodes)) for tree, nodes in going]


def _run(model: TargetModel, cache: KVCache, going: Seq[tuple[GrowingTree, list[int]]]) -> Tensor:
    """Logits [nodes, width] after each node of each tree; the rows stay written, uncommitted."""
    spans = [tree.level(nodes) for tree, nodes in going]
    cache.reserve_capacity(max(tree.base + len(tree.written.tokens) for tree, _ in going))
    with cache.transaction() as transaction:
        for tree, _ in going:
            transaction.reserve(tree.slot, len(tree.written.tokens))
        inputs = build_inputs(spans, cache.capacity, model.geometry, model.row_policy)
        logits = model.forward(inputs, cache).logits
    return logits[[row for first, count in inputs.logits_of for row in range(first, first + count)]]


def _branch(found: Seq[tuple[GrowingTree, Seq[int | None]]], logits: Tensor) -> None:
    """Adds the children of each node from its row of `logits`."""
    if all(is_plain_greedy(tree.view.params, tree.view.prefix) for tree, _ in found):
        count, vocab = max(tree.size for tree, _ in found), found[0][0].view.prefix.vocab_size
        tokens, chances = leading_tokens_greedy(logits, vocab, count)
        rows = zip(tokens.tolist(), chances.tolist(), strict=True)
        for tree, nodes in found:
            for node in nodes:
                tree.add(node, *next(rows))
        return
    first = 0
    for tree, nodes in found:
        _branch_one(tree, nodes, logits[first : first + len(nodes)])
        first += len(nodes)


def _branch_one(tree: GrowingTree, nodes: Seq[int | None], logits: Tensor) -> None:
    """Under the request's options; nothing is added after a node whose logits allow no token."""
    view = tree.view
    paths = [[tree.tokens[at] for at in tree.path(node)] for node in nodes]
    keys = [draft_key(view, len(view.tokens) + len(path)) for path in paths]
    noise = torch.tensor(keys, device=logits.device)
    try:
        tokens, chances = leading_tokens(logits, view.params, view.prefix, paths, noise, tree.size)
    except RequestFailed:
        for i, node in enumerate(nodes) if len(nodes) > 1 else ():
            _branch_one(tree, [node], logits[i : i + 1])
        return
    probs = to_probs(logits, view.params, view.prefix, paths) if reports_probs(view) else [None] * len(nodes)
    for node, own, shares, row in zip(nodes, tokens.tolist(), chances.tolist(), probs, strict=True):
        tree.add(node, own, shares, row)
