"""Weights as the compiled decoder reads them: packed, and quantised where asked for.

bfloat16   as they are
int8       whole numbers from -127 to 127, a scale (float16) for every 32 of an output's inputs
int4       whole numbers from 0 to 15, a scale and a minimum (float16) for every 32 of an output's inputs, which is the
           form of llama.cpp's Q4_1 blocks; those of a GGUF file are taken over as they are
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.blocks import BLOCK, Blocks, quantise_int4

__all__ = [
    "GROUP",
    "LANES",
    "Kind",
    "Packed",
    "ProductStruct",
    "Weight",
    "interleave",
    "interleave_bias",
    "join",
    "pack",
]

LANES, GROUP = 16, BLOCK  # as in decoder.cpp
_ROWS = 4096  # quantised at once
_ALIGNMENT = 64


class Kind(IntEnum):
    """How a weight is held; the numbers are those of decoder.cpp."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


Weight = Tensor | Blocks


class ProductStruct(ctypes.Structure):
    """`Product` of decoder.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight [n, k]; `struct` points into `held`."""

    struct: ProductStruct
    kind: Kind
    nbytes: int
    held: tuple[Tensor, ...] = field(repr=False)


def join(parts: Sequence[Weight]) -> Weight:
    """Weights of several products that read the same, one below the other; all blocks, or all floats."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Blocks) for part in parts):
        blocks = [part for part in parts if isinstance(part, Blocks)]
        return Blocks(
            torch.cat([b.whole for b in blocks]),
            torch.cat([b.scale for b in blocks]),
            torch.cat([b.least for b in blocks]),
        )
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def interleave(gate: Weight, up: Weight) -> Weight:
    """Blocks of 16 outputs of `gate` and of `up` in turn."""
    if isinstance(gate, Blocks) and isinstance(up, Blocks):
        return Blocks(_turns(gate.whole, up.whole), _turns(gate.scale, up.scale), _turns(gate.least, up.least))
    assert isinstance(gate, Tensor) and isinstance(up, Tensor)
    return _turns(gate, up)


def interleave_bias(gate: Tensor, up: Tensor) -> Tensor:
    """`interleave` for the biases of the two."""
    return _turns(gate, up)


def _turns(gate: Tensor, up: Tensor) -> Tensor:
    blocks = [part.reshape(-1, LANES, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(blocks, 1).flatten(0, 2)


def pack(library: ctypes.CDLL, weight: Weight, kind: Kind, bias: Tensor | None = None) -> Packed:
    """`weight` [n, k] as `kind`; k is a multiple of 32. Blocks are packed as INT4 alone."""
    rows, columns = (weight.whole if isinstance(weight, Blocks) else weight).shape
    assert columns % GROUP == 0, f"{columns} inputs"
    blocks = -(-rows // LANES)
    size = library.paceline_block_bytes(int(kind), columns)
    out = _aligned(blocks * size)
    held = [out]
    scale = None
    if kind is Kind.BF16:
        assert isinstance(weight, Tensor)
        _into(library.paceline_pack_bf16, out, size, 0, rows, columns, weight.to(torch.bfloat16).contiguous())
    elif kind is Kind.INT8:
        assert isinstance(weight, Tensor)
        steps = []
        for low in range(0, rows, _ROWS):
            groups = weight[low : low + _ROWS].float().view(-1, columns // GROUP, GROUP)
            step = (groups.abs().amax(-1) / 127).half()
            inverse = torch.where(step > 0, 1 / step.float(), 0.0)
            whole = (groups * inverse[..., None]).round_().clamp_(-127, 127).to(torch.int8)
            steps.append(step)
            _into(library.paceline_pack_int8, out, size, low, len(whole), columns, whole)
        padded = F.pad(torch.cat(steps), (0, 0, 0, blocks * LANES - rows))
        scale = padded.view(blocks, LANES, -1).transpose(1, 2).contiguous()
        held.append(scale)
    else:
        for low in range(0, rows, _ROWS):
            some = _some(weight, low)
            tensors = (some.whole.contiguous(), some.scale.contiguous(), some.least.contiguous())
            _into(library.paceline_pack_int4, out, size, low, len(some.whole), columns, *tensors)
    if bias is not None:
        bias = F.pad(bias.float(), (0, blocks * LANES - rows))
        held.append(bias)
    struct = ProductStruct(
        int(kind),
        rows,
        columns,
        blocks,
        out.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
    )
    return Packed(struct, kind, sum(t.numel() * t.element_size() for t in held), tuple(held))


def _some(weight: Weight, low: int) -> Blocks:
    high = low + _ROWS
    if isinstance(weight, Blocks):
        return Blocks(weight.whole[low:high], weight.scale[low:high], weight.least[low:high])
    return quantise_int4(weight[low:high])


def _into(function: object, out: Tensor, size: int, low: int, rows: int, columns: int, *tensors: Tensor) -> None:
    """Pack rows from `low` on, a multiple of LANES, to their place."""
    at = ctypes.c_void_p(out.data_ptr() + low // LANES * size)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    function(*pointers, rows, columns, at)  # type: ignore[operator]


def _aligned(size: int) -> Tensor:
    memory = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size]
