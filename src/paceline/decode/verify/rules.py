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

Under `rejection` and `block` the text has the target's law and depends on the drafts. They weigh a draft against
the distribution it was drawn from, so that one has to be reported exactly, and drafts have noise of their own.

What a draft's length may depend on under these two: on committed tokens, and on the drafts before its end and
what was computed of them. A drafter may stop behind any token it has drafted, because of that token. Nobody may
cut drafts once they are drawn, or choose among drafters, having seen them: that picks by value what the test
takes for drawn. (For both rules the proof goes node by node: whether a node has a child may be any function of
the path to it; `tests/verify/test_rules_exact.py` enumerates it.) The shape of a tree is settled before it is
drawn. Drafts that were certain (one-hot) may be cut by anything that was known when the round began.

At temperature 0 every rule is the walk along the target's argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.proposal import Proposal, Verdict
from paceline.errors import UsageError

__all__ = ["RULES", "Rule", "get_rule", "row_paths", "row_positions", "walk"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    lossless                 the output has the target's own distribution
    shares_noise             drafts are drawn with the target's noise, and what they were drawn from is not looked
                             at; else with noise of their own, and every draft comes with its distribution
    length_may_see_drafts    sampled drafts may be cut or chosen having seen them (see the module's docstring)
    """

    name: str
    description: str
    lossless: bool
    shares_noise: bool
    length_may_see_drafts: bool


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("coupled", "same seed, same text, whatever the drafter, the draft length and the batch", True, True, True),
        Rule("greedy", "what coupled is at temperature 0: drafts that equal the target's argmax", True, True, True),
        Rule("rejection", "accept with min(1, p/q), else draw from the rest (arXiv 2211.17192)", True, False, False),
        Rule("block", "accept drafts jointly, for longer runs (arXiv 2403.10444)", True, False, False),
        Rule("relaxed", "as coupled, and any draft the target finds likely enough; not exact", False, True, True),
    )
}


def get_rule(name: str) -> Rule:
    """The rule of that name; raises UsageError where there is none."""
    rule = RULES.get(name)
    if rule is None:
        raise UsageError(f"the acceptance rule is {name!r}; allowed: {', '.join(RULES)}. Choose one of these.")
    return rule


def walk(proposal: Proposal, draws: Sequence[int]) -> Verdict:
    """Follows from node to node the child that equals the target's draw, as long as there is one.

    `draws[0]` is the target's draw after the last committed token, `draws[1 + i]` the one after node i. Among
    equal siblings the first is followed. The next token is the draw at the end of the path, a bonus where the
    path ends in a leaf.
    """
    assert len(draws) == 1 + len(proposal), f"{len(draws)} draws for a proposal of {len(proposal)} nodes"
    if proposal.is_chain:
        right = 0
        while right < len(proposal) and proposal.tokens[right] == draws[right]:
            right += 1
        return Verdict(tuple(range(right)), int(draws[right]), "bonus" if right == len(proposal) else "recovered")
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
