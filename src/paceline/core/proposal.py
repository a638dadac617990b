"""What a drafter hands over, and what verification says of it.

A proposal is a tree of tokens; a chain is the tree in which every node hangs on the one before it. It carries
the exact distribution each token was drawn from, because `rejection` and `block` divide by it (a drafter that
reports another one biases the output: cases SD-08 and SD-09). Rules under which drafts share the target's noise do
not look at it, and `OneHot` stands there.

Siblings that were sampled are drawn without replacement, in the order listed; the row of a later one may leave its
earlier siblings in or out, the rule takes them out and scales the rest.

    draft        a token of a proposal
    accepted     a draft that verification kept
    recovered    the target's own token after a rejection
    bonus        the target's own token after every draft on the path was accepted
    committed    tokens that are final; their KV stays in the cache
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

__all__ = ["Dense", "Distribution", "OneHot", "Proposal", "Sparse", "TargetToken", "Verdict"]

TargetToken = Literal["recovered", "bonus"]


@dataclass(frozen=True, slots=True)
class OneHot:
    """Each token was certain before it was proposed (string match, greedy drafting)."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Row i is the full distribution that token i was drawn from."""

    probs: Any  # [nodes, vocab] float tensor or array; rows sum to 1


@dataclass(frozen=True, slots=True)
class Sparse:
    """Row i is a distribution over the listed ids, no id twice, zero elsewhere."""

    ids: Any  # [nodes, support] int
    probs: Any  # [nodes, support] float; rows sum to 1


Distribution = OneHot | Dense | Sparse


@lru_cache(maxsize=256)
def _chain_parents(length: int) -> tuple[int | None, ...]:
    return (None, *range(length - 1)) if length else ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens proposed for one sequence in one round; empty means plain decoding this round.

    `parents[i]` is the index of the node that node i follows, or None where it follows the last committed
    token. Parents come before their children. `confidence[i]`, where a drafter has it, is its own estimate that
    node i is accepted given its parent was. The last `forced` nodes are not the drafter's: a grammar
    allows nothing else there.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int | None, ...] = ()
    distribution: Distribution = OneHot()
    drafter: str = "none"
    confidence: tuple[float, ...] | None = None
    forced: int = 0

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.parents)} parents; one parent per token")
        for node, parent in enumerate(() if self.is_chain else self.parents):
            if parent is not None and not 0 <= parent < node:
                raise ValueError(f"parent of node {node} is {parent}; allowed: None or an earlier node")
        if self.confidence is not None and len(self.confidence) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.confidence)} confidences")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(
        cls,
        tokens: tuple[int, ...] | list[int],
        drafter: str,
        distribution: Distribution | None = None,
        confidence: tuple[float, ...] | None = None,
    ) -> Proposal:
        """A chain: node i follows node i-1, node 0 follows the last committed token."""
        return cls(tuple(tokens), _chain_parents(len(tokens)), distribution or OneHot(), drafter, confidence)

    @property
    def is_chain(self) -> bool:
        return self.parents == _chain_parents(len(self.parents))

    def depths(self) -> list[int]:
        """Distance of each node from the last committed token, 1 for its direct children."""
        if self.is_chain:
            return list(range(1, 1 + len(self.parents)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return depths

    def path_to(self, node: int) -> list[int]:
        """Node indices from the first draft to `node`, both included."""
        path = [node]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which nodes of a proposal are kept, in order, and the target's own token after them."""

    path: tuple[int, ...]
    next_token: int
    kind: TargetToken

    def tokens(self, proposal: Proposal) -> list[int]:
        """The tokens this round commits: the accepted drafts, then the target's own."""
        return [proposal.tokens[node] for node in self.path] + [self.next_token]
