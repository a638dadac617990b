"""Four-bit weights in blocks of 32, the form that GGUF's Q4_0, Q4_1 and Q4_K have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK", "FOUR_BITS", "MORE_BITS", "Blocks", "quantise_int4", "read_blocks"]

BLOCK = 32
_Q = gguf.GGMLQuantizationType
FOUR_BITS = frozenset({_Q.Q4_0, _Q.Q4_1, _Q.Q4_K})
MORE_BITS = frozenset({_Q.Q5_0, _Q.Q5_1, _Q.Q5_K, _Q.Q6_K, _Q.Q8_0, _Q.Q8_1, _Q.Q8_K})


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [n, k] as scale * whole + least.

    whole         [n, k] uint8 from 0 to 15
    scale, least  [n, k / 32] float16
    """

    whole: Tensor
    scale: Tensor
    least: Tensor

    @staticmethod
    def cat(parts: Sequence[Blocks]) -> Blocks:
        """One below the other."""
        return Blocks(*(torch.cat([getattr(part, name) for part in parts]) for name in ("whole", "scale", "least")))


def quantise_int4(weight: Tensor) -> Blocks:
    """Floats [n, k] to blocks between the least and the largest of each."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // BLOCK, BLOCK)
    least = groups.amin(-1).half()
    scale = ((groups.amax(-1) - least.float()) / 15).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    whole = ((groups - least.float()[..., None]) * inverse[..., None]).round_().clamp_(0, 15)
    return Blocks(whole.to(torch.uint8).view(rows, columns), scale, least)


def read_blocks(
    rows: np.ndarray,  # [n, bytes of a row], as the file has them
    kind: gguf.GGMLQuantizationType,  # one of FOUR_BITS
) -> Blocks:
    """The blocks of a stored weight; of Q4_K the products of its two scales, rounded to float16."""
    count = len(rows)
    if kind is _Q.Q4_K:
        whole, scale, least = _q4_k(rows.reshape(-1, 144))
    elif kind is _Q.Q4_1:
        parts = rows.reshape(-1, 20)
        whole, scale = _nibbles(parts[:, 4:]), parts[:, :2].copy().view(np.float16)
        least = parts[:, 2:4].copy().view(np.float16)
    else:
        parts = rows.reshape(-1, 18)
        whole, scale = _nibbles(parts[:, 2:]), parts[:, :2].copy().view(np.float16)
        least = scale * np.float16(-8)
    return Blocks(*(torch.from_numpy(np.ascontiguousarray(a)).view(count, -1) for a in (whole, scale, least)))


def _nibbles(data: np.ndarray) -> np.ndarray:
    """[blocks, n] bytes to [blocks, 2 n] numbers: the low halves, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _q4_k(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight blocks of 32 under a common pair of scales: [m, 144] bytes to [m, 256], [m, 8] and [m, 8]."""
    common = parts[:, :4].copy().view(np.float16).astype(np.float32)
    packed = parts[:, 4:16]
    scale = np.empty((len(parts), 8), np.float32)
    least = np.empty((len(parts), 8), np.float32)
    scale[:, :4], least[:, :4] = packed[:, :4] & 63, packed[:, 4:8] & 63
    scale[:, 4:] = packed[:, 8:] & 15 | packed[:, :4] >> 6 << 4
    least[:, 4:] = packed[:, 8:] >> 4 | packed[:, 4:8] >> 6 << 4
    whole = _nibbles(parts[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return whole, (scale * common[:, :1]).astype(np.float16), (-least * common[:, 1:]).astype(np.float16)
