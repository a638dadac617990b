"""Block: the drafts of a chain are accepted jointly, for runs longer than `rejection` has, and as lossless.

Sun et al., arXiv 2403.10444. With p, q the target's and the draft's probabilities along drafts x_1 .. x_D:

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))                   P(at least i drafts are kept | x_1 .. x_i)
    Z_i = sum of (w_i p - q)+ over the tokens after x_i               P(exactly i are kept | x_1 .. x_i), i < D
    h_i = Z_i / (Z_i + 1 - w_i),  h_D = w_D

Each i is tried with chance h_i on its own; the last that holds is how many are kept (none: 0). What follows is
drawn from (w_i p - q)+ scaled to one, after the whole block from p. Where Z_i = 0 and w_i = 1, h_i = 1.

Whether i is kept depends on drafts behind it, so all noise of a round is keyed by its first position too.
A row is None where nothing can follow: as if the text ended there, so h_i = w_i and no later draft can be kept.

For chains. `judge` gives trees to `rejection`, which is as lossless; which of the two judges is settled by the shape
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.verify.chances import Chances, draft_row, positive_part

__all__ = ["chance_of_prefix", "verify_block"]


def verify_block(
    proposal: Proposal,
    target_probs: Sequence[Any],  # 1 + nodes rows [vocab]; row 0 after the last committed token, never None
    chances: Chances,
) -> Verdict:
    """Lossless where `proposal.distribution` is what the drafts were drawn from, independently of `chances`."""
    assert proposal.is_chain, f"block verification is for chains; the parents are {proposal.parents}"
    length = len(proposal)
    kept, left = 0, None  # how many drafts, and what of the target's row no draft has taken
    weight: Any = 1
    for i in range(1 + length):
        row = target_probs[i]
        last = row is None or i == length
        if last:
            rest, chance = row, weight
        else:
            drafted = draft_row(proposal, i, row)
            rest = positive_part(row * weight - drafted)
            chance = chance_of_prefix(rest.sum(), weight)
        if i == 0 or chances.accept(i - 1, proposal.tokens[i - 1], chance):
            kept, left = i, rest
        if last:
            break
        weight = min(1, weight * row[proposal.tokens[i]] / drafted[proposal.tokens[i]])
        if weight == 0:
            break  # so are all later chances
    return _verdict(proposal, target_probs, kept, left, chances)


def chance_of_prefix(rest: Any, weight: Any) -> Any:
    """h_i from Z_i and w_i: the chance with which i drafts are tried."""
    return rest / (rest + 1 - weight) if rest + 1 > weight else 1


def _verdict(proposal: Proposal, target_probs: Sequence[Any], kept: int, left: Any, chances: Chances) -> Verdict:
    path = tuple(range(kept))
    if left is None:
        return Verdict(path[:-1], proposal.tokens[kept - 1], "recovered")
    if kept == len(proposal):
        return Verdict(path, chances.draw(kept, left, "bonus"), "bonus")
    # Rounding can leave nothing, where p and q are all but equal: then p itself is right (case SD-13).
    weights = left if left.sum() > 0 else target_probs[kept]
    return Verdict(path, chances.draw(kept, weights, "recovered"), "recovered")
