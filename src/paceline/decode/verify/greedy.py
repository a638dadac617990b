"""Greedy verification: keep drafts while they equal the target's most probable token."""

from __future__ import annotations

from torch import Tensor

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.verify.rules import walk

__all__ = ["verify_greedy"]


def verify_greedy(
    proposal: Proposal,
    target_probs: Tensor,  # [1 + nodes, vocab], row 0 after the last committed token, row 1 + i after node i
) -> Verdict:
    """Equal to plain greedy decoding token for token; of equally probable tokens the lowest id counts."""
    return walk(proposal, target_probs.argmax(-1).tolist())
