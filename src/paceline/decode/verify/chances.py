"""The dice of `rejection` and `block`: what a rule asks of chance, and the noise that answers.

A rule asks two things. `accept`: keep this draft, with that probability? `draw`: a token by these weights. It asks
each at most once for each position and token of a round, so every answer is a number of its own, keyed by position,
purpose, token and the round's first position. With the first position no number is used in two rounds: `block`
looks at the drafts behind the one it judges, and a later round draws for the same positions again.

Rules compute with rows that may be tensors or NumPy arrays of fractions: the tests put every answer in turn and so
enumerate the law of the very code that runs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.proposal import Dense, OneHot, Proposal, Sparse, TargetToken
from paceline.decode.verify.noise import (
    Purpose,
    block_members,
    block_minima,
    exponential_noise,
    position_key,
)
from paceline.decode.verify.support import block_maxima, members

__all__ = ["Chances", "RoundNoise", "draft_row", "first_to_arrive", "positive_part"]

_BLOCKS = 64  # looked into before all are


class Chances(Protocol):
    """`ahead` is how many tokens lie between the committed ones and the position asked for."""

    def accept(self, ahead: int, token: int, chance: Any) -> bool:
        """True with probability min(1, chance)."""
        ...

    def draw(self, ahead: int, weights: Any, kind: TargetToken) -> int:
        """A token with probability in proportion to weights [vocab], not all zero."""
        ...


class RoundNoise:
    """The answers of one sequence's noise in one round. A bonus is the token plain decoding would draw there."""

    __slots__ = ("first_position", "key")

    def __init__(self, key: int, first_position: int) -> None:
        self.key, self.first_position = key, first_position

    def accept(self, ahead: int, token: int, chance: Any) -> bool:
        key = position_key(self.key, self.first_position + ahead, Purpose.ACCEPT, self.first_position)
        arrival = exponential_noise(torch.tensor([key]), torch.tensor([token]))[0, 0]
        return bool(torch.exp(-arrival) < float(chance))  # exp(-Exp(1)) is uniform in (0, 1)

    def draw(self, ahead: int, weights: Tensor, kind: TargetToken) -> int:
        position = self.first_position + ahead
        key = (
            position_key(self.key, position, Purpose.TARGET)
            if kind == "bonus"
            else position_key(self.key, position, Purpose.RESIDUAL, self.first_position)
        )
        return first_to_arrive(weights, torch.tensor([key], device=weights.device))


def first_to_arrive(
    weights: Tensor,  # [vocab] float64, at least one above 0
    key: Tensor,  # [1] int64
) -> int:
    """argmin of the key's noise over the weights. Looks into the blocks of ids that can hold it: a block's smallest
    noise over its largest weight is no later than any of its members.
    """
    row = weights.unsqueeze(0)
    maxima = block_maxima(row)
    bounds = block_minima(key, maxima.shape[1]) / maxima
    for count in (_BLOCKS, maxima.shape[1]):
        nearest = bounds.topk(min(count + 1, bounds.shape[1]), largest=False)
        ids, noise = block_members(key, nearest.indices[:, :count])
        arrivals = noise / members(row, ids).clamp_(min=0.0)
        first = int(arrivals.argmin())
        if count >= bounds.shape[1] or bool(arrivals[0, first] < nearest.values[0, count]):
            break
    return int(ids[0, first])


def draft_row(
    proposal: Proposal,
    node: int,
    like: Any,  # [vocab], a row of the target
) -> Any:
    """What the node's token was drawn from, over the target's ids: [vocab], of the kind of `like`.

    Ids that the target does not have are left out: there no draft has probability.
    """
    row = like * 0
    match proposal.distribution:
        case OneHot():
            row[proposal.tokens[node]] = 1
        case Dense(probs):
            width = min(len(probs[node]), len(row))
            row[:width] += probs[node][:width]
        case Sparse(ids, probs):
            row[ids[node]] += probs[node]
    token = proposal.tokens[node]
    assert row[token] > 0, f"{proposal.drafter} drew token {token} and says that it had no probability"
    return row


def positive_part(row: Any) -> Any:
    """max(row, 0) for tensors and arrays of fractions alike."""
    return row.clip(0)
