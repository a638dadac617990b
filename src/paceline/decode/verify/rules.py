"""Acceptance rules: which drafts of a proposal are kept, and what the target itself says after them.

Each rule is one pure function in a file of its own; this one holds what they share and their names, and does
not import torch. Rows of a verify pass: row 0 follows the last committed token, row 1 + i follows node i.

    draft        a token of a proposal
    accepted     a draft that the rule kept
    recovered    the target's own token after a rejection
    bonus        the target's own token after every draft on the path was accepted
    committed    tokens that are final

Under `greedy` and `coupled` the target's draw at a position does not depend on the proposal, and a draft is
kept while it equals that draw. So the emitted text is a function of the target and its noise alone: whatever
the drafter proposes, and however far, only the number of rounds changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.proposal import Proposal, Verdict
from paceline.errors import UsageError

__all__ = ["RULES", "Rule", "get_rule", "row_paths", "row_positions", "walk"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `lossless`: the output has the target's own distribution. `available`: it is built."""

    name: str
    description: str
    lossless: bool
    available: bool


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "coupled",
            "same seed, same text, whatever the drafter, the draft length and the batch",
            True,
            True,
        ),
        Rule("greedy", "what coupled is at temperature 0: drafts that equal the target's argmax", True, True),
        Rule("rejection", "accept with min(1, p/q), else draw from the rest (arXiv 2211.17192)", True, False),
        Rule("block", "accept drafts jointly, for longer runs (arXiv 2403.10444)", True, False),
        Rule("relaxed", "accept any draft the target finds likely enough; not exact", False, False),
    )
}


def get_rule(name: str) -> Rule:
    """The rule of that name, ready to use; raises UsageError where it is unknown or not built yet."""
    ready = ", ".join(rule.name for rule in RULES.values() if rule.available)
    rule = RULES.get(name)
    if rule is None:
        raise UsageError(f"the acceptance rule is {name!r}; allowed: {ready}. Choose one of these.")
    if not rule.available:
        raise UsageError(f"the acceptance rule {name!r} is planned and not built yet; allowed: {ready}.")
    return rule


def walk(proposal: Proposal, draws: Sequence[int]) -> Verdict:
    """Follows from node to node the child that equals the target's draw, as long as there is one.

    `draws[0]` is the target's draw after the last committed token, `draws[1 + i]` the one after node i. Among
    equal siblings the first is followed. The next token is the draw at the end of the path, a bonus where the
    path ends in a leaf.
    """
    assert len(draws) == 1 + len(proposal), f"{len(draws)} draws for a proposal of {len(proposal)} nodes"
    path: list[int] = []
    last: int | None = None
    want = draws[0]
    # Parents come before their children: one pass over the nodes finds the whole path.
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if parent == last and token == want:
            path.append(node)
            last, want = node, draws[1 + node]
    leaf = last not in proposal.parents
    return Verdict(tuple(path), int(want), "bonus" if leaf else "recovered")


def row_paths(proposal: Proposal) -> list[list[int]]:
    """The drafts before each row's position: [] for row 0, the tokens from the root to node i for 1 + i."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append([*paths[0 if parent is None else 1 + parent], token])
    return paths


def row_positions(proposal: Proposal, first_position: int) -> list[int]:
    """The absolute position each row draws for; `first_position` is the number of committed tokens."""
    return [first_position, *(first_position + depth for depth in proposal.depths())]
