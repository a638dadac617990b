"""Rejection: a draft x is kept with probability min(1, p(x) / q(x)), else the target draws from what is left.

Leviathan et al., arXiv 2211.17192, theorem 1; Chen et al., arXiv 2302.01318. With p the target's distribution at
a position and q the one the draft was drawn from, what is left is (p - q)+ scaled to one.

Trees: siblings are tried in the order listed. Each that is rejected leaves p <- (p - q)+, and is taken out of the
q of the next, which is scaled to one again, for siblings are drawn without replacement (Sequoia, arXiv 2402.12374;
RSD, arXiv 2402.14160). A token listed twice among siblings says nothing new and is passed over. With one-hot
drafts a sibling is kept with the probability that p has left for it: the law of `coupled`.

A row is None where nothing can follow (the model failed there, or the options exclude every token). Text that comes
to it ends there in plain decoding too, so its last draft stands as the last token of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.proposal import Proposal, TargetToken, Verdict
from paceline.decode.verify.chances import Chances, draft_row, positive_part

__all__ = ["verify_rejection"]


def verify_rejection(
    proposal: Proposal,
    target_probs: Sequence[Any],  # 1 + nodes rows [vocab]; row 0 after the last committed token, never None
    chances: Chances,
) -> Verdict:
    """Lossless where `proposal.distribution` is what the drafts were drawn from, independently of `chances`."""
    path: list[int] = []
    while True:
        here = path[-1] if path else None
        row = target_probs[0 if here is None else 1 + here]
        if row is None:
            return Verdict(tuple(path[:-1]), proposal.tokens[path[-1]], "recovered")
        children = [node for node, parent in enumerate(proposal.parents) if parent == here]
        kept, left = _try(proposal, children, row, len(path), chances)
        if kept is None:
            kind: TargetToken = "recovered" if children else "bonus"
            return Verdict(tuple(path), chances.draw(len(path), left, kind), kind)
        path.append(kept)


def _try(
    proposal: Proposal, siblings: list[int], row: Any, ahead: int, chances: Chances
) -> tuple[int | None, Any]:
    """The sibling that is kept, if any, and what is left of the target's row [vocab] after those that are not."""
    rejected: list[int] = []
    for node in siblings:
        token = proposal.tokens[node]
        if token in rejected:
            continue
        drafted = draft_row(proposal, node, row)
        if rejected:
            drafted[rejected] = 0
            drafted = drafted / drafted.sum()
        if chances.accept(ahead, token, row[token] / drafted[token]):
            return node, row
        left = positive_part(row - drafted)
        total = left.sum()
        # Rounding can leave nothing, where p and q are all but equal: then p itself is right (case SD-13).
        row = left / total if total > 0 else row
        rejected.append(token)
    return None, row
