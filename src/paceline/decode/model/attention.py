"""Attention over padded keys under an additive mask, and elementwise functions by whole rows.

A query's result does not depend on the queries beside it or on masked blocks of keys behind its own, wherever the
trial of `rows.py` says so: the trial runs this very function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.step import KV_BLOCK

__all__ = ["ACTIVATIONS", "Attention", "by_rows", "soft_cap"]

_SERIAL = 16384  # elements up to which PyTorch leaves gelu on one thread (found by trying); silu and tanh 32,767


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of `x` [rows, width] by whole rows on one thread.

    Split over threads, a row is cut where it falls, and what lies at the cut goes through another exponential,
    whose last bits differ: a row's bits would depend on the rows beside it.
    """
    if x.device.type != "cpu" or x.numel() <= _SERIAL:
        return function(x)
    return torch.cat([function(part) for part in x.split(max(1, _SERIAL // x.shape[1]))])


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": _gelu}


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of `x` [rows, width]."""
    return by_rows(torch.tanh, x / cap) * cap


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale * q k + mask) v, the scores soft-capped first where `cap` is given.

    queries [slots, heads, queries, head_dim]; keys, values [slots, heads, keys, head_dim]; mask [slots, 1,
    queries, keys - past]: the first `past` keys are seen by all. `scale` is the head width to the power of -1/2
    where None.
    """

    scale: float | None = None
    cap: float | None = None

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, past: int = 0) -> Tensor:
        if self.cap is not None:
            return self._capped(queries, keys, values, F.pad(mask, (past, 0)), self.cap)
        if past:
            return self._joined(queries, keys, values, mask, past)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)

    def _joined(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, past: int) -> Tensor:
        """Over what is before a prompt chunk without a mask, over the chunk with one, then joined.

        Two softmaxes join by their log-sums: the parts weigh exp(lse_i - lse), lse = log(sum of exp(lse_i)).
        """
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        before, before_sum = flash(queries, keys[:, :, :past], values[:, :, :past], scale=self.scale)
        own, own_sum = flash(
            queries, keys[:, :, past:], values[:, :, past:], attn_mask=mask, scale=self.scale
        )
        share = torch.sigmoid(before_sum - own_sum)[..., None]
        return torch.lerp(own.float(), before.float(), share).to(queries.dtype)

    def _capped(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float) -> Tensor:
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        blocks = range(0, keys.shape[2], KV_BLOCK)  # products of one size, however many keys there are
        scores = torch.cat([queries @ keys[:, :, b : b + KV_BLOCK].transpose(2, 3) for b in blocks], dim=3)
        capped = soft_cap((scores * scale).float().flatten(0, 2), cap).view(scores.shape)
        weights = (capped + mask).softmax(-1).to(values.dtype)
        mixed = torch.zeros((), dtype=torch.float32, device=queries.device)
        for b in blocks:  # one after the other: a masked block adds an exact zero
            mixed = mixed + (weights[..., b : b + KV_BLOCK] @ values[:, :, b : b + KV_BLOCK]).float()
        return mixed.to(values.dtype)
