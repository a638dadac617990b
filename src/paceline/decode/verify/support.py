"""The largest logits of a row without a sort, and the tokens that top-k, top-p and min-p keep.

Tokens are ordered by logit, higher first, equal logits by id, lower first: a total order, so top-k and top-p
keep the same set on every run. The first `count` tokens of a row lie in the first `count` blocks of
neighbouring ids, blocks ordered by their own first tokens: only block maxima and those blocks are looked at.

Everything that rounds is computed row by row or along a row: a row's result does not depend on the rows
beside it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.noise import BLOCK

__all__ = ["argmax", "block_maxima", "kept_tokens", "largest", "members", "row_mass", "scaled"]

_COUNTS = (64, 128, 512, 4096)  # candidates looked at for top-p and min-p until they suffice; then all
_SPARE = 16  # candidates beyond top-k, to see where equal logits end
_SMALLEST_FLOAT32_TEMPERATURE = 1e-30


def block_maxima(logits: Tensor) -> Tensor:  # [rows, width]
    """The largest logit of each block of `BLOCK` ids (the last may be short): [rows, blocks]. NaN spreads."""
    whole = logits.shape[1] // BLOCK * BLOCK
    parts = [logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < logits.shape[1]:
        parts.append(logits[:, whole:].amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:  # [rows, width]
    """Each row's largest logit and the lowest id that has it, both [rows, 1]; NaN counts as the largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # NumPy's is vectorised: 5 to 7 times as fast
        found = np.fromiter((row.argmax() for row in logits.numpy()), np.int64, len(logits))
        best = torch.from_numpy(found).unsqueeze(1)
        return logits.gather(1, best), best
    ids = _block_ids(block_maxima(logits).argmax(-1, keepdim=True))
    values = members(logits, ids)
    place = values.argmax(-1, keepdim=True)
    return values.gather(1, place), ids.gather(1, place)


def members(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits of all ids of some blocks [rows, n]; -inf for ids past the row's end."""
    width = logits.shape[1]
    if width % BLOCK == 0:  # blocks end where the row ends
        return logits.gather(1, ids)
    return logits.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -math.inf)


def _block_ids(blocks: Tensor) -> Tensor:  # [rows, n]
    return (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(1)


def largest(
    logits: Tensor,  # [rows, width]
    count: int,
    maxima: Tensor,  # [rows, blocks], from `block_maxima`
) -> tuple[Tensor, Tensor]:
    """The first `count` tokens in order: logits and ids, both [rows, min(count, width)]."""
    width = logits.shape[1]
    if count == 0:
        return logits[:, :0], torch.zeros(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    for candidates in (count + _SPARE, 8 * (count + _SPARE), width):
        values, ids = _first(logits, candidates, maxima)
        if candidates >= width or bool((values[:, count - 1] > values[:, -1]).all()):
            break
    return values[:, :count], ids[:, :count]


def _first(logits: Tensor, count: int, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """As `largest`, but of the tokens equal to the last one given any may be missing."""
    width = logits.shape[1]
    if count >= width:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    if count * BLOCK < width:
        ids = _block_ids(maxima.topk(count, dim=-1, sorted=False).indices)
        values, places = members(logits, ids).topk(count, dim=-1, sorted=False)
        ids = ids.gather(1, places)
    else:
        values, ids = logits.topk(count, dim=-1, sorted=False)
    # One integer that orders like (value descending, id ascending); adding 0 turns -0.0 into 0.0.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = ((ordered.long() << 32) | (0x7FFFFFFF - ids)).argsort(dim=-1, descending=True)
    return values.gather(1, order), ids.gather(1, order)


def scaled(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """(logits - top) / temperature in float64, `top` the largest logit of each row [rows, 1]; at most 0."""
    return (logits.double() - top.double()) / temperature


def row_mass(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Sum of exp((logits - top) / temperature) over each row: [rows, 1] float64, at least 1."""
    dtype = torch.float32 if temperature > _SMALLEST_FLOAT32_TEMPERATURE else torch.float64
    scratch = torch.empty(logits.shape[1], dtype=dtype, device=logits.device)  # large blocks are slow to get
    sums = []
    for row, peak in zip(logits, top, strict=True):
        torch.sub(row, peak, out=scratch)
        sums.append(scratch.div_(temperature).exp_().sum(dtype=torch.float64))
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
    if top_k is not None:
        values, ids = largest(logits, top_k, maxima)
        keep = _keep(scaled(values, top, params.temperature), params, None)
    else:
        for count in (*_COUNTS, width):
            values, ids = _first(logits, count, maxima)
            keep = _keep(scaled(values, top, params.temperature), params, mass)
            if count >= width or not bool((keep & (values == values[:, -1:])).any()):
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
