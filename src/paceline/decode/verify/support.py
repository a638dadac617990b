"""The largest logits of a row without a sort, and the tokens that top-k, top-p and min-p keep.

Tokens are ordered by logit, higher first, equal logits by id, lower first: a total order, so top-k and top-p
keep the same set on every run. The first `count` tokens of a row lie in the first `count` blocks of
neighbouring ids, blocks ordered by their own first tokens: only block maxima and those blocks are looked at.

Everything that rounds is computed row by row or along a row in float64: a row's result does not depend on the
rows beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.noise import BLOCK

__all__ = ["block_ids", "block_maxima", "kept_tokens", "largest", "row_mass", "scaled"]

_FIRST_COUNT = 256  # candidates looked at first for top-p and min-p
_NEXT_COUNT = 4096
_SMALLEST_FLOAT32_TEMPERATURE = 1e-30


def block_maxima(logits: Tensor) -> Tensor:  # [rows, width]
    """The largest logit of each block of `BLOCK` ids (the last may be short): [rows, blocks]. NaN spreads."""
    whole = logits.shape[1] // BLOCK * BLOCK
    parts = [logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < logits.shape[1]:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def block_ids(blocks: Tensor) -> Tensor:  # [rows, n]
    """The ids of the given blocks: [rows, n * BLOCK]."""
    return (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(1)


def largest(
    logits: Tensor,  # [rows, width]
    count: int,
    maxima: Tensor | None = None,  # [rows, blocks], from `block_maxima`
) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in order: logits and ids, both [rows, min(count, width)]."""
    width = logits.shape[1]
    count = min(count, width)
    blocks = -(-width // BLOCK)
    if 4 * count >= blocks:
        ids = torch.arange(width, device=logits.device).expand(logits.shape[0], width)
        return _first(logits, ids, count)
    maxima = block_maxima(logits) if maxima is None else maxima
    _, chosen = _first(maxima, torch.arange(blocks, device=logits.device).expand_as(maxima), count)
    ids = block_ids(chosen)
    values = logits.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -math.inf)
    return _first(values, ids, count)


def _first(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` of the given tokens, by one integer that orders like (value down, id up)."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = ((ordered.long() << 32) | (0x7FFFFFFF - ids)).topk(count, dim=-1).indices
    return values.gather(1, places), ids.gather(1, places)


def scaled(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """(logits - top) / temperature in float64, `top` the largest logit of each row [rows, 1]; at most 0."""
    return (logits.double() - top.double()) / temperature


def row_mass(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Sum of exp((logits - top) / temperature) over each row: [rows, 1] float64, at least 1."""
    dtype = torch.float32 if temperature > _SMALLEST_FLOAT32_TEMPERATURE else torch.float64
    sums = [
        (row.to(dtype) - peak).div_(temperature).exp_().sum(dtype=torch.float64)
        for row, peak in zip(logits, top.to(dtype), strict=True)
    ]
    return torch.stack(sums).unsqueeze(1)


def kept_tokens(
    logits: Tensor,  # [rows, width] float32, every row with a finite `top`
    params: SamplingParams,
    top: Tensor,  # [rows, 1]
    maxima: Tensor,  # [rows, blocks]
) -> tuple[Tensor, Tensor] | None:
    """What top-k, then top-p, then min-p keep: ids [rows, n] and whether each is kept [rows, n].

    Kept tokens come in order, so they are the head of each row. None where no option drops anything.
    """
    width = logits.shape[1]
    top_k = params.top_k if params.top_k is not None and params.top_k < width else None
    if top_k is None and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    mass = row_mass(logits, top, params.temperature) if top_k is None and params.top_p < 1.0 else None
    for count in [top_k] if top_k is not None else [_FIRST_COUNT, _NEXT_COUNT, width]:
        values, ids = largest(logits, count, maxima)
        keep = _keep(scaled(values, top, params.temperature), params, mass)
        if count == top_k or count >= width or not bool(keep[:, -1].any()):
            break
    most = int(keep.sum(-1).max())
    return ids[:, :most], keep[:, :most]


def _keep(
    log_weights: Tensor,  # [rows, n] float64, in order
    params: SamplingParams,
    mass: Tensor | None,  # [rows, 1] of the whole row; None: the given tokens are all there are
) -> Tensor:
    keep = log_weights > -math.inf
    if params.top_p < 1.0:
        weights = log_weights.exp()
        sums = weights.cumsum(-1)
        total = sums[:, -1:] if mass is None else mass
        keep &= sums - weights < params.top_p * total  # kept while the more probable ones lack mass
    if params.min_p > 0.0:
        keep &= log_weights >= math.log(params.min_p)
    return keep
