"""Memory that is taken as it is written and can be given back in parts.

On Linux a private anonymous mapping costs address space alone until a page is written, and `madvise` gives pages
back, which then read as zeros again. So a cache can be laid out for the longest text in every slot, which is
what attention wants (one stride, no gathering, no moving when a text grows), and hold only what is in use.

Small pages are asked for: with huge ones the first token of a head would take the room of thousands. Elsewhere
than in host memory, and where `madvise` is missing, this is an ordinary tensor that keeps what it has.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LazyZeros", "can_be_lazy", "give_back_freed"]

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, named by Python from 3.13 on


def can_be_lazy(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"


def give_back_freed() -> None:
    """Give what was freed back to the system, where the C library keeps it and can be told to (glibc)."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class LazyZeros:
    """`tensor` of `shape`, zero until written."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._map: mmap.mmap | None = None
        count = math.prod(shape)
        if not can_be_lazy(device) or not count:
            self.tensor = torch.zeros(tuple(shape), dtype=dtype, device=device)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=count).view(tuple(shape))

    def discard(self, part: Tensor) -> None:
        """Give back the whole pages of `part`, a contiguous view of `tensor`; what they held becomes zeros."""
        if self._map is None or not part.numel():
            return
        assert part.is_contiguous(), "pages are given back by contiguous parts"
        low = part.data_ptr() - self.tensor.data_ptr()
        high = low + part.numel() * part.element_size()
        low, high = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high:
            self._map.madvise(mmap.MADV_DONTNEED, low, high - low)
