"""From a pass's logits to one verdict per sequence.

Rows of plainly greedy sequences are drawn in one call, as are those of sequences that sample alike and without options;
the others one by one. A row's draw does not depend on the rows beside it (`verify/support.py`).
"""

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
from paceline.decode.verify.options import has_options
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
    drawn: list[Seq[int] | None] = [None] * len(sequences)
    greedy = [i for i, s in enumerate(sequences) if is_plain_greedy(s.request.params, s.prefix)]
    if greedy:
        _draw_greedy(greedy, logits, logits_of, vocab_size, drawn)
    if len(greedy) < len(sequences):
        _draw_alike(_alike(sequences, proposals, drawn), sequences, proposals, logits, logits_of, drawn)
    verdicts: list[Verdict | RequestFailed] = []
    for sequence, proposal, (first, count), draws in zip(sequences, proposals, logits_of, drawn, strict=True):
        try:
            verdicts.append(
                _by_rule(sequence, proposal, logits[first : first + count]) if draws is None else walk(proposal, draws)
            )
        except RequestFailed as failure:
            verdicts.append(failure)
    return verdicts


def _draw_greedy(
    greedy: Seq[int],
    logits: Tensor,
    logits_of: Seq[tuple[int, int]],
    vocab_size: int,
    drawn: list[Seq[int] | None],
) -> None:
    """Put the argmax of every row of the sequences `greedy` into `drawn`; nothing where a row is unusable."""
    low = min(logits_of[i][0] for i in greedy)
    high = max(sum(logits_of[i]) for i in greedy)
    tokens, usable = greedy_tokens(logits[low:high], vocab_size)
    token_list, usable_list = tokens.tolist(), usable.tolist()
    for i in greedy:
        first, count = logits_of[i]
        rows = slice(first - low, first - low + count)
        if all(usable_list[rows]):
            drawn[i] = token_list[rows]


def _alike(sequences: Seq[Sequence], proposals: Seq[Proposal], drawn: Seq[Seq[int] | None]) -> list[list[int]]:
    """Sequences not drawn yet whose verdict is the walk along their draws, by how they sample; no group of one."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
        params, rule = sequence.request.params, sequence.request.draft.verify
        walks = rule in ("coupled", "greedy") or (rule in ("rejection", "block") and not len(proposal))
        if drawn[i] is None and walks and not has_options(params, sequence.prefix):
            groups.setdefault((params.temperature, params.top_k, params.top_p, params.min_p), []).append(i)
    return [members for members in groups.values() if len(members) > 1]


def _draw_alike(
    groups: Seq[Seq[int]],
    sequences: Seq[Sequence],
    proposals: Seq[Proposal],
    logits: Tensor,
    logits_of: Seq[tuple[int, int]],
    drawn: list[Seq[int] | None],
) -> None:
    """Put the draws of each group into `drawn`; nothing where a row fails: then each of the group is judged alone."""
    for members in groups:
        members = sorted(members, key=lambda i: logits_of[i])
        rows = _rows(logits, [logits_of[i] for i in members])
        paths = [path for i in members for path in row_paths(proposals[i])]
        keys = [key for i in members for key in _keys(sequences[i], proposals[i])]
        one = sequences[members[0]]
        try:
            tokens = draw(rows, one.request.params, one.prefix, paths, torch.tensor(keys, device=rows.device)).tolist()
        except RequestFailed:
            continue
        at = 0
        for i in members:
            count = logits_of[i][1]
            drawn[i] = tokens[at : at + count]
            at += count


def _rows(logits: Tensor, places: Seq[tuple[int, int]]) -> Tensor:
    """The rows at `places` (first, count), rising; a view where they lie together."""
    low, high = places[0][0], sum(places[-1])
    if sum(count for _, count in places) == high - low:
        return logits[low:high]
    return torch.cat([logits[first : first + count] for first, count in places])


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
    keys = torch.tensor(_keys(sequence, proposal), device=rows.device)
    tokens: list[int] = draw(rows, sequence.request.params, sequence.prefix, row_paths(proposal), keys).tolist()
    return tokens


def _keys(sequence: Sequence, proposal: Proposal) -> list[int]:
    """The noise of each row's draw."""
    positions = row_positions(proposal, len(sequence.tokens))
    return [position_key(sequence.noise_key, position, Purpose.TARGET) for position in positions]


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
