"""Weights that lie in their file until a decoder takes them, and are read in parts of rows.

So a loading model is in memory once, in the form it is computed in; beside that there is a part of a weight per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.decode.model.blocks import Blocks, quantise_int4
from paceline.errors import ModelFormatError

__all__ = ["PART", "Stored", "StoredTensors", "blocks_of", "join", "parts_of", "read_bytes", "stack"]

PART = 128  # rows read and packed at once
_LINES = 20  # of progress while a model is read


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight by rows of its first dimension.

    rows       [low, high) as floats, in memory of their own
    blocks     [low, high) as the 4-bit blocks that the file has, None where it has the weight otherwise
    more_bits  whether the file has it in 5 to 8 bits
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    blocks: Callable[[int, int], Blocks] | None = None
    more_bits: bool = False

    @staticmethod
    def of(tensor: Tensor) -> Stored:
        return Stored(tuple(tensor.shape), lambda low, high: tensor[low:high])

    def read(self) -> Tensor:
        return self.rows(0, self.shape[0])

    def part(self, low: int, high: int) -> Stored:
        """Its rows [low, high) as a weight of their own."""
        blocks = self.blocks
        return replace(
            self,
            shape=(high - low, *self.shape[1:]),
            rows=lambda a, b: self.rows(low + a, low + b),
            blocks=None if blocks is None else lambda a, b: blocks(low + a, low + b),
        )


class StoredTensors(MutableMapping[str, Tensor]):
    """Name -> tensor, read whenever it is looked up; `take` gives it away unread."""

    def __init__(
        self, stored: Mapping[str, Stored], progress: Callable[[str], None] | None = None, source: str = ""
    ) -> None:
        self._stored = dict(stored)
        self._all, self._taken = len(self._stored), count()
        self._progress, self._source = progress, source

    @staticmethod
    def of(tensors: MutableMapping[str, Tensor]) -> StoredTensors:
        """`tensors` itself where it is such; what is given otherwise is emptied, so that no weight is held twice."""
        if isinstance(tensors, StoredTensors):
            return tensors
        return StoredTensors({name: Stored.of(tensors.pop(name)) for name in list(tensors)})

    def take(self, name: str) -> Stored | None:
        stored = self._stored.pop(name, None)
        if stored is not None and self._progress is not None:
            number = next(self._taken)
            if number % max(self._all // _LINES, 1) == 0:
                self._progress(f"reading {self._source}: {number} of {self._all} tensors")
        return stored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._stored[name] = Stored.of(tensor)

    def __delitem__(self, name: str) -> None:
        del self._stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def parts_of(rows: int) -> Iterator[tuple[int, int]]:
    """[low, high) of every part of as many rows."""
    return ((low, min(low + PART, rows)) for low in range(0, rows, PART))


def blocks_of(weight: Stored, low: int, high: int) -> Blocks:
    """Rows in 4-bit blocks: the file's where it has such, else made from floats."""
    return quantise_int4(weight.rows(low, high)) if weight.blocks is None else weight.blocks(low, high)


def join(parts: Sequence[Stored]) -> Stored:
    """Weights of several products that read the same, one below the other; blocks where all are such."""
    if len(parts) == 1:
        return parts[0]
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + part.shape[0])

    def cut(low: int, high: int) -> Iterator[tuple[Stored, int, int]]:
        for part, start in zip(parts, bounds, strict=False):
            first, last = max(low - start, 0), min(high - start, part.shape[0])
            if first < last:
                yield part, first, last

    def blocks(low: int, high: int) -> Blocks:
        return Blocks.cat([part.blocks(a, b) for part, a, b in cut(low, high) if part.blocks is not None])

    return Stored(
        (bounds[-1], *parts[0].shape[1:]),
        lambda low, high: torch.cat([part.rows(a, b) for part, a, b in cut(low, high)]),
        blocks if all(part.blocks is not None for part in parts) else None,
        any(part.more_bits for part in parts),
    )


def stack(parts: Sequence[Stored]) -> Stored:
    """Weights of one shape as one weight with a dimension more."""
    return Stored(
        (len(parts), *parts[0].shape), lambda low, high: torch.stack([part.read() for part in parts[low:high]])
    )


def read_bytes(path: Path, offset: int, size: int) -> np.ndarray:
    """`size` bytes of a file from `offset` on, in memory of their own: pages of a mapped file would stay."""
    try:
        data = np.fromfile(path, np.uint8, size, offset=offset)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) != size:
        raise ModelFormatError(f"{path} was cut short while it was read; download it again.")
    return data
