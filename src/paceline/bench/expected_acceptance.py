"""How many drafts of a given chain each rule keeps on average over its own noise: no noise is drawn.

Given the chain, its draft probabilities q and the target's p along it:

    rejection   keeps draft i with chance min(1, p/q), each on its own
    block       keeps at least i with chance 1 - product over j >= i of (1 - h_j), with the rule's own h_j
    coupled     keeps draft x with the chance that target and drafter draw x, given that the drafter did. For one
                race of exponentials seen by both that is 1 / (q(x) * sum over tokens k of max(p_k / p_x, q_k / q_x))

The chain is one whose tokens were drawn from q, so that the mean over chains is the rule's mean acceptance: under all
three the drafts have the same law, and the three numbers of one chain compare the rules on the same proposal.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from torch import Tensor

from paceline.decode.verify.block import chance_of_prefix
from paceline.decode.verify.chances import positive_part

__all__ = ["expected_accepted"]


def expected_accepted(
    tokens: tuple[int, ...],
    target_probs: Tensor,  # [1 + drafts, vocab] float64
    draft_probs: Tensor,  # [drafts, vocab] float64
) -> dict[str, float]:
    """Mean number of drafts kept, by rule."""
    return {
        "rejection": _by_chances(_rejection(tokens, target_probs, draft_probs)),
        "block": _block(tokens, target_probs, draft_probs),
        "coupled": _by_chances(_coupled(tokens, target_probs, draft_probs)),
    }


def _by_chances(chances: list[float]) -> float:
    return sum(accumulate(chances, mul))


def _rejection(tokens: tuple[int, ...], target: Tensor, draft: Tensor) -> list[float]:
    return [min(1.0, float(target[i, x] / draft[i, x])) for i, x in enumerate(tokens)]


def _coupled(tokens: tuple[int, ...], target: Tensor, draft: Tensor) -> list[float]:
    chances: list[float] = []
    for i, token in enumerate(tokens):
        own, drafted = target[i, token], draft[i, token]
        if own == 0:
            return [*chances, 0.0]
        rivals = (target[i] / own).maximum(draft[i] / drafted).sum()
        chances.append(float(1 / (drafted * rivals)))
    return chances


def _block(tokens: tuple[int, ...], target: Tensor, draft: Tensor) -> float:
    weight, holds = 1.0, []
    for i, token in enumerate(tokens):
        if i > 0:
            holds.append(float(chance_of_prefix(positive_part(target[i] * weight - draft[i]).sum(), weight)))
        weight = min(1.0, weight * float(target[i, token] / draft[i, token]))
    holds.append(weight)
    missed, kept = 1.0, 0.0
    for hold in reversed(holds):
        missed *= 1.0 - hold
        kept += 1.0 - missed
    return kept
