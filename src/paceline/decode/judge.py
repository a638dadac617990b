"""From a pass's logits to one verdict per sequence: greedy rows of the whole batch at once, the others one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.sequence import Sequence
from paceline.decode.verify.block import verify_block
from paceline.decode.verify.chances import RoundNoise
from paceline.decode.verify.leniency import Typical
from paceline.decode.verify.noise import Purpose, position_key
from paceline.decode.verify.probabilities import draw, greedy_tokens, is_plain_greedy, to_probs
from paceline.decode.verify.rejection import verify_rejection
from paceline.decode.verify.relaxed import verify_relaxed
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
            rows = logits[first : first + count]
            verdicts.append(_by_rule(sequence, proposal, rows) if draws is None else walk(proposal, draws))
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


def _by_rule(sequence: Sequence, proposal: Proposal, rows: Tensor) -> Verdict:
    """The verdict by the request's own rule; at temperature 0 and without drafts all rules are the walk."""
    settings = sequence.request.draft
    probs = _Probabilities(sequence, proposal, rows)
    if settings.verify in ("rejection", "block") and len(proposal) and not sequence.request.params.greedy:
        noise = RoundNoise(sequence.noise_key, len(sequence.tokens))
        rule = verify_block if settings.verify == "block" and proposal.is_chain else verify_rejection
        return rule(proposal, probs, noise)
    draws = _draws(sequence, proposal, rows)
    if settings.verify == "relaxed":
        return verify_relaxed(proposal, probs, draws, settings.relaxed or Typical())
    return walk(proposal, draws)


class _Probabilities(Seq["Tensor | None"]):
    """The target's distribution after each row [vocab] float64, made when a rule asks for it.

    None where nothing can follow; for the first row that is the sequence's failure, for plain decoding has it too.
    """

    def __init__(self, sequence: Sequence, proposal: Proposal, rows: Tensor) -> None:
        self._sequence, self._rows, self._paths = sequence, rows, row_paths(proposal)
        self._known: dict[int, Tensor | None] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: Any) -> Any:
        if row not in self._known:
            self._known[row] = self._compute(row)
        return self._known[row]

    def _compute(self, row: int) -> Tensor | None:
        sequence = self._sequence
        try:
            probs = to_probs(
                self._rows[row : row + 1], sequence.request.params, sequence.prefix, self._paths[row : row + 1]
            )
        except RequestFailed:
            if row == 0:
                raise
            return None
        return probs[0].double()


def _draws(sequence: Sequence, proposal: Proposal, rows: Tensor) -> Seq[int]:
    if sequence.prefix.grammar is not None and len(proposal):
        return _LazyDraws(sequence, proposal, rows)
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


class _LazyDraws(Seq[int]):
    """As `_draws`, each row's draw made when the walk gets there: masks of a grammar cost time."""

    def __init__(self, sequence: Sequence, proposal: Proposal, rows: Tensor) -> None:
        self._sequence, self._rows = sequence, rows
        self._paths, self._positions = row_paths(proposal), row_positions(proposal, len(sequence.tokens))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: Any) -> Any:
        one, sequence = slice(row, row + 1), self._sequence
        key = position_key(sequence.noise_key, self._positions[row], Purpose.TARGET)
        keys = torch.tensor([key], device=self._rows.device)
        return int(draw(self._rows[one], sequence.request.params, sequence.prefix, self._paths[one], keys))
