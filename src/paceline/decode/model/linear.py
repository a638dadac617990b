"""Matrix products of PyTorch's decoder, each weight held in one of four forms.

Floats are kept in oneDNN's own blocked layout where PyTorch offers that. Measured on a CPU with avx512_bf16: 1.3 to 2
times the speed of the plain layout for 1 to 32 rows in bfloat16, 1.5 to 4 times in float32. Whole numbers go through
PyTorch's weight-only kernels, which give a row the same bits in a product of any size (tried at load like every
product, `rows.py`), and use no matrix units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.blocks import BLOCK, Blocks
from paceline.decode.model.stored import Stored, blocks_of, parts_of

__all__ = ["Form", "Int4Weight", "Int8Weight", "Linear"]

_PACK_ROWS = 16  # the row count oneDNN lays the weight out for: a verify block
_INT4_ROWS = 16  # a multiple of as many outputs is what the int4 kernel takes


class Form(StrEnum):
    """How a weight is held; INT4 is INT8 for shapes that the kernel of PyTorch does not take."""

    PLAIN = "plain"
    PACKED = "packed"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def of_head(self) -> Form:
        """INT8 at least: what comes out of it is not summed up any further."""
        return Form.INT8 if self is Form.INT4 else self

    @property
    def of_router(self) -> Form:
        """Small, and what it says decides: floats."""
        return Form.PACKED if self in (Form.INT8, Form.INT4) else self


class Int8Weight:
    """[n, k] as whole numbers from -127 to 127 with a scale (bfloat16) for every output."""

    def __init__(self, weight: Stored) -> None:
        parts = [_int8(weight.rows(*part)) for part in parts_of(weight.shape[0])]
        self.whole, self.scale = (torch.cat(both) for both in zip(*parts, strict=True))
        self.nbytes = self.whole.numel() + self.scale.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.whole, self.scale)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight in bfloat16, as an embedding reads them."""
        return self.whole[indices].to(torch.bfloat16) * self.scale[indices][:, None]


class Int4Weight:
    """[n, k] as whole numbers from 0 to 15 with a scale and a middle (bfloat16) for every 32 of an output's inputs."""

    def __init__(self, weight: Stored) -> None:
        blocks = Blocks.cat([blocks_of(weight, *part) for part in parts_of(weight.shape[0])])
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.whole.int(), 1)
        middle = blocks.least.float() + 8 * blocks.scale.float()  # the kernel takes 8 from the whole numbers
        self._scales = torch.stack([blocks.scale.float(), middle], -1).transpose(0, 1).bfloat16().contiguous()
        self.nbytes = self._packed.numel() + self._scales.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, BLOCK, self._scales)

    @staticmethod
    def takes(weight: Stored) -> bool:
        """Of a file that has more bits, more are kept."""
        return not weight.more_bits and weight.shape[0] % _INT4_ROWS == 0 and weight.shape[1] % BLOCK == 0


class Linear:
    """y = x W^T + b for x [rows, in]."""

    def __init__(self, weight: Stored, bias: Tensor | None = None, *, form: Form = Form.PACKED) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight: Int8Weight | Int4Weight | None = None
        self._product: Callable[[Tensor], Tensor]
        if form in (Form.INT8, Form.INT4):
            self.weight = Int4Weight(weight) if form is Form.INT4 and Int4Weight.takes(weight) else Int8Weight(weight)
            self.nbytes = self.weight.nbytes
            self._product = self._whole(self.weight, bias)
        else:
            floats = weight.read()
            self.nbytes = floats.numel() * floats.element_size()
            self._product = _float_product(floats, bias, pack=form is Form.PACKED)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def over(self, x: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
        """The product piece by piece: every piece [low, high) of rows is a product of its own."""
        if len(pieces) == 1:
            return self(x)
        return torch.cat([self(x[low:high]) for low, high in pieces])

    @staticmethod
    def _whole(weight: Int8Weight | Int4Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return weight if bias is None else lambda x: weight(x).add_(bias)


def _float_product(weight: Tensor, bias: Tensor | None, pack: bool) -> Callable[[Tensor], Tensor]:
    if pack and (packed := _pack(weight)) is not None:
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    floats = weight.float()
    scale = (floats.abs().amax(-1) / 127).bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    return (floats * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout, or None where that is not to be had."""
    offered = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if weight.device.type != "cpu" or not offered:
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
