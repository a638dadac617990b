"""Coupled verification: the target draws with the position's own noise; drafts that equal its draw are kept.

Drafter-invariant speculation, Daliri et al., arXiv 2408.07978: with Gumbel-max noise fixed by the position,
the target's token is `argmin E / p` whatever was proposed. A drafter that draws from its own probabilities
with the same noise mostly proposes that very token: the more often, the closer the two distributions are.

`probabilities.draw` followed by `rules.walk` is this rule on logits, without full distributions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.verify.noise import exponential_noise
from paceline.decode.verify.rules import walk

__all__ = ["verify_coupled"]


def verify_coupled(
    proposal: Proposal,
    target_probs: Tensor,  # [1 + nodes, vocab], row 0 after the last committed token, row 1 + i after node i
    keys: Tensor,  # [1 + nodes] int64: `position_key` of each row's position, Purpose.TARGET
) -> Verdict:
    """Lossless for any proposal: the emitted tokens are the target's own draws."""
    ids = torch.arange(target_probs.shape[1], device=target_probs.device)
    draws = (exponential_noise(keys, ids) / target_probs.double()).argmin(-1)
    return walk(proposal, draws.tolist())
