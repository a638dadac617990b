"""Weights as the compiled decoder reads them: packed, and quantised where asked for.

bfloat16   as they are
int8       whole numbers from -127 to 127, a scale (float16) for every 32 of an output's inputs
int4       whole numbers from 0 to 15, a scale and a minimum (float16) for every 32 of an output's inputs, which is the
           form of llama.cpp's Q4_1 blocks; those of a GGUF file are taken over as they are
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.blocks import BLOCK, Blocks
from paceline.decode.model.stored import Stored, blocks_of, parts_of

__all__ = [
    "GROUP",
    "LANES",
    "Kind",
    "Packed",
    "ProductStruct",
    "WeightMemory",
    "interleave",
    "interleave_bias",
    "pack",
]

LANES, GROUP = 16, BLOCK  # as in decoder.cpp
_LINE, _HUGE_PAGE, _MAPPED = 64, 2 << 20, 64 << 20  # bytes


class Kind(IntEnum):
    """How a weight is held; the numbers are those of decoder.cpp."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


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


def interleave(gate: Stored, up: Stored) -> Stored:
    """Blocks of 16 outputs of `gate` and of `up` in turn; read by whole pairs of blocks."""

    def halves(low: int, high: int) -> tuple[int, int]:
        assert low % (2 * LANES) == high % (2 * LANES) == 0, f"rows {low} to {high} cut a pair of blocks"
        return low // 2, high // 2

    def blocks(low: int, high: int) -> Blocks:
        assert gate.blocks is not None and up.blocks is not None
        ours, theirs = gate.blocks(*halves(low, high)), up.blocks(*halves(low, high))
        return Blocks(
            _turns(ours.whole, theirs.whole), _turns(ours.scale, theirs.scale), _turns(ours.least, theirs.least)
        )

    return Stored(
        (2 * gate.shape[0], gate.shape[1]),
        lambda low, high: _turns(gate.rows(*halves(low, high)), up.rows(*halves(low, high))),
        None if gate.blocks is None or up.blocks is None else blocks,
        gate.more_bits or up.more_bits,
    )


def interleave_bias(gate: Tensor, up: Tensor) -> Tensor:
    """`interleave` for the biases of the two."""
    return _turns(gate, up)


def _turns(gate: Tensor, up: Tensor) -> Tensor:
    blocks = [part.reshape(-1, LANES, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(blocks, 1).flatten(0, 2)


def pack(
    library: ctypes.CDLL, weight: Stored, kind: Kind, bias: Tensor | None = None, memory: WeightMemory | None = None
) -> Packed:
    """`weight` [n, k] as `kind`, part by part, into `memory`; k is a multiple of 32."""
    memory = memory or WeightMemory()
    rows, columns = weight.shape
    assert columns % GROUP == 0, f"{columns} inputs"
    blocks = -(-rows // LANES)
    size = library.paceline_block_bytes(int(kind), columns)
    out = memory.take(blocks * size)
    held = [out]
    scales = torch.zeros(blocks * LANES, columns // GROUP, dtype=torch.float16) if kind is Kind.INT8 else None
    function = getattr(library, f"paceline_pack_{kind.name.lower()}")
    for low, high in parts_of(rows):
        tensors, steps = _as_packed(weight, kind, low, high)
        at = ctypes.c_void_p(out.data_ptr() + low // LANES * size)
        function(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), high - low, columns, at)
        if scales is not None and steps is not None:
            scales[low:high] = steps
    scale = None
    if scales is not None:
        scale = memory.take(2 * scales.numel()).view(torch.float16).view(blocks, columns // GROUP, LANES)
        scale.copy_(scales.view(blocks, LANES, -1).transpose(1, 2))
        held.append(scale)
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


def _as_packed(weight: Stored, kind: Kind, low: int, high: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What decoder.cpp packs of these rows, and their scales where it wants them apart."""
    if kind is Kind.BF16:
        return (weight.rows(low, high).to(torch.bfloat16).contiguous(),), None
    if kind is Kind.INT4:
        some = blocks_of(weight, low, high)
        return (some.whole.contiguous(), some.scale.contiguous(), some.least.contiguous()), None
    groups = weight.rows(low, high).float().view(high - low, -1, GROUP)
    step = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(step > 0, 1 / step.float(), 0.0)
    return ((groups * inverse[..., None]).round_().clamp_(-127, 127).to(torch.int8),), step


class WeightMemory:
    """Room for what lasts, in mappings of its own: among what is read and dropped while a model loads it would keep
    holes open. In huge pages where the system gives them: a pass reads all of it, and misses fewer page entries."""

    def __init__(self) -> None:
        self._lock, self._left = threading.Lock(), torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` zero bytes, aligned to a cache line."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if len(self._left) < whole:
                self._left = _mapping(max(whole, _MAPPED))
            taken, self._left = self._left[:size], self._left[whole:]
        return taken


def _mapping(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE
    return room[start : start + size]
