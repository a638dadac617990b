"""Sampling options on logits: allowed tokens, grammar, minimum length, bad words, logit bias, penalties.

Each is a function of the prefix at the row's own position: committed tokens plus the drafts before it on its
path in the tree, nothing else. The order is that of `core/sampling.py`.

Choices that the names leave open:
- repetition penalty counts prompt and output, presence and frequency penalty the output only;
- before `min_tokens` the end-of-text ids are impossible also with `ignore_eos`, which only says that they do
  not end the output;
- the last token of a bad word is banned where the others end the output; the prompt is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.grammar import GrammarState
from paceline.decode.verify.prefix import PrefixState

__all__ = ["apply_options", "has_options"]

Paths = Sequence[Sequence[int]]


def has_options(params: SamplingParams, prefix: PrefixState) -> bool:
    """Whether any option can change a logit at the next position or after it."""
    return bool(
        params.has_penalties
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or prefix.grammar is not None
        or len(prefix.output) < params.min_tokens
    )


def apply_options(
    logits: Tensor,  # [rows, width] float32, changed in place; no padding ids
    params: SamplingParams,
    prefix: PrefixState,
    paths: Paths,
) -> Tensor:
    """The same tensor with every option applied at each row's own position."""
    if params.allowed_token_ids is not None:
        logits = _allow(logits, params.allowed_token_ids, prefix)
    if prefix.grammar is not None:
        _constrain(logits, prefix.grammar, paths)
    _forbid_ends(logits, params, prefix, paths)
    if params.bad_words:
        _ban_words(logits, params, prefix, paths)
    if params.logit_bias:
        _add_bias(logits, params, prefix)
    if params.has_penalties:
        _penalise(logits, params, prefix, paths)
    return logits


def _allow(logits: Tensor, allowed: tuple[int, ...], prefix: PrefixState) -> Tensor:
    ids = prefix.tensor("allowed", allowed, lambda: torch.tensor(sorted(set(allowed))))
    ids = ids[ids < logits.shape[1]].to(logits.device)
    return torch.full_like(logits, -math.inf).index_copy_(1, ids, logits[:, ids])


def _constrain(logits: Tensor, grammar: GrammarState, paths: Paths) -> None:
    """Rows that nothing leads to (behind an end-of-text, or a draft off the grammar) stay as they are."""
    for row, path in enumerate(paths):
        mask = grammar.mask(path)
        if mask is not None:
            logits[row].masked_fill_(~mask[: logits.shape[1]].to(logits.device), -math.inf)


def _forbid_ends(logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths) -> None:
    early = [r for r, path in enumerate(paths) if len(prefix.output) + len(path) < params.min_tokens]
    ends = sorted(i for i in prefix.eos_token_ids.union(params.stop_token_ids) if i < logits.shape[1])
    if early and ends:
        logits[torch.tensor(early).unsqueeze(1), torch.tensor(ends)] = -math.inf


def _ban_words(logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths) -> None:
    words = prefix.bad_words(params.bad_words)
    lengths = {len(start) for start in words}
    rows: list[int] = []
    banned: list[int] = []
    for row, path in enumerate(paths):
        tail = [*prefix.output[-max(lengths) :], *path] if max(lengths) else []
        for length in lengths:
            if length <= len(tail):
                ends = words.get(tuple(tail[len(tail) - length :]), [])
                banned += [token for token in ends if token < logits.shape[1]]
                rows += [row] * (len(banned) - len(rows))
    if rows:
        logits[torch.tensor(rows), torch.tensor(banned)] = -math.inf


def _add_bias(logits: Tensor, params: SamplingParams, prefix: PrefixState) -> None:
    bias = params.logit_bias
    ids = prefix.tensor("bias_ids", bias, lambda: torch.tensor(list(bias), dtype=torch.int64))
    values = prefix.tensor("bias", bias, lambda: torch.tensor(list(bias.values()), dtype=torch.float32))
    real = ids < logits.shape[1]
    ids, values = ids[real].to(logits.device), values[real].to(logits.device)
    logits[:, ids] += values


def _penalise(logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths) -> None:
    """Only the logits of tokens seen before or on some row's path are touched."""
    ids, output_counts, seen = _counts_by_row(prefix, paths)
    real = ids < logits.shape[1]
    if not bool(real.all()):
        ids, output_counts, seen = ids[real], output_counts[:, real], seen[:, real]
    ids, output_counts, seen = (t.to(logits.device) for t in (ids, output_counts, seen))
    values = logits[:, ids]
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
    values -= params.frequency_penalty * output_counts
    values -= params.presence_penalty * (output_counts > 0)
    logits[:, ids] = values


def _counts_by_row(prefix: PrefixState, paths: Paths) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct ids [n]; output counts and whether seen at all, [rows, n], each row with its own path."""
    counts = prefix.counts()
    known = counts.slots
    fresh = sorted({token for path in paths for token in path} - known.keys())
    slots = {token: len(known) + k for k, token in enumerate(fresh)}
    ids = torch.cat([counts.ids, torch.tensor(fresh, dtype=torch.int64)])
    output_counts = torch.zeros(len(paths), len(ids))
    output_counts[:, : len(counts.ids)] = counts.output_counts
    seen = torch.zeros(len(paths), len(ids), dtype=torch.bool)
    seen[:, : len(counts.ids)] = True
    for row, path in enumerate(paths):
        for token in path:
            slot = slots[token] if token in slots else known[token]
            output_counts[row, slot] += 1
            seen[row, slot] = True
    return ids, output_counts, seen
