"""From a pass's logits to one verdict per sequence: greedy rows of the whole batch at once, the others one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.sequence import Sequence
from paceline.decode.verify.noise import Purpose, position_key
from paceline.decode.verify.probabilities import draw, greedy_tokens, is_plain_greedy
from paceline.decode.verify.rules import row_paths, row_positions, walk
from paceline.errors import RequestFailed

__all__ = ["judge"]


def judge(
    sequences: Seq[Sequence],
    proposals: Seq[Proposal],
    logits: Tensor,  # [logit rows, width]
    logits_of: Seq[tuple[int, int]],  # first logit row of each sequence and how many
    vocab_size: int,
) -> list[Verdict | RequestFailed]:
    """The verdict of each sequence, or why that sequence alone cannot go on.

    Raises nothing for a single bad row: a NaN in one sequence's logits is that sequence's failure (case SD-13).
    """
    drawn = _greedy_draws(sequences, logits, logits_of, vocab_size)
    verdicts: list[Verdict | RequestFailed] = []
    for sequence, proposal, (first, count), draws in zip(sequences, proposals, logits_of, drawn, strict=True):
        try:
            if draws is None:
                draws = _draws(sequence, proposal, logits[first : first + count])
            verdicts.append(walk(proposal, draws))
        except RequestFailed as failure:
            verdicts.append(failure)
    return verdicts


def _greedy_draws(
    sequences: Seq[Sequence], logits: Tensor, logits_of: Seq[tuple[int, int]], vocab_size: int
) -> list[list[int] | None]:
    """Argmax of the rows of plainly greedy sequences, in one call; None for the others and for unusable rows."""
    plain = [is_plain_greedy(s.request.params, s.prefix) for s in sequences]
    if not any(plain):
        return [None] * len(sequences)
    tokens, usable = greedy_tokens(logits, vocab_size)
    token_list, usable_list = tokens.tolist(), usable.tolist()
    return [
        token_list[first : first + count] if greedy and all(usable_list[first : first + count]) else None
        for greedy, (first, count) in zip(plain, logits_of, strict=True)
    ]


def _draws(sequence: Sequence, proposal: Proposal, rows: Tensor) -> list[int]:
    positions = row_positions(proposal, len(sequence.tokens))
    keys = [position_key(sequence.noise_key, position, Purpose.TARGET) for position in positions]
    tokens = draw(
        rows,
        sequence.request.params,
        sequence.prefix,
        row_paths(proposal),
        torch.tensor(keys, device=rows.device),
    )
    return [int(t) for t in tokens.tolist()]
