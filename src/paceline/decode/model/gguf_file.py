"""Reading a GGUF file: its metadata at once, its tensors one by one straight into the wanted dtype.

Only the header is parsed on opening (the tensors stay on disk), so a file of any size is inspected in well under a
second. Dequantisation is the `gguf` package's own, a few hundred rows at a time: the peak memory is the result plus a
few megabytes. Refused with a sentence: files that are no GGUF, are cut short, are one
part of several, hold a format version or a tensor type that is not known.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch

from paceline.decode.model.blocks import FOUR_BITS, Blocks, read_blocks
from paceline.decode.model.stored import read_bytes
from paceline.errors import ModelFormatError, ModelNotFound, UnsupportedModel

__all__ = ["GGUFFile", "GGUFTensor"]

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_ROWS_AT_ONCE = 256
_DEFAULT_ALIGNMENT = 32
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is in torch's order: rows first, columns last."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size_bytes: int


class GGUFFile:
    """An open GGUF file.

    metadata   every key/value pair, arrays as Python lists
    tensors    name -> `GGUFTensor`
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _map_file(path) as data:
            header, length = _Header(path, data), len(data)
        self.metadata, table = header.metadata, header.tensors
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise UnsupportedModel(
                f"{path} is one of {parts} parts of a split GGUF; join them with llama-gguf-split first."
            )
        self.tensors = {t.name: t for t in table}
        end = max((t.offset + t.size_bytes for t in table), default=0)
        if end > length:
            raise ModelFormatError(
                f"{path} is cut short: its tensors need {end} bytes and the file has {length}; download it again."
            )

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """The metadata value under `key`, checked to be of `kind`; None where the file has none."""
        value = self.metadata.get(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise ModelFormatError(f"{self.path}: metadata {key} is {value!r:.80}; allowed: a {kind.__name__}.")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """`get`, with an error where the key is missing."""
        value = self.get(key, kind)
        if value is None:
            raise ModelFormatError(f"{self.path} lacks the metadata {key}; convert the model again.")
        return value

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        row_order: np.ndarray | None = None,  # [rows]; result row i is the file's row_order[i]
        low: int = 0,
        high: int | None = None,
    ) -> torch.Tensor:
        """Rows [low, high) of the first dimension, dequantised to `dtype`, in memory of their own."""
        tensor = self.tensors[name]
        high = tensor.shape[0] if high is None else high
        if len(tensor.shape) == 1:
            whole = self._dequantise(tensor, self._lines(tensor, 0, 1)).reshape(-1)
            return torch.from_numpy(whole if row_order is None else whole[row_order])[low:high].to(dtype, copy=True)
        deep = math.prod(tensor.shape[1:-1])
        out = torch.empty((high - low, *tensor.shape[1:]), dtype=dtype)
        flat = out.view(-1, tensor.shape[-1])
        for start in range(0, len(flat), _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, len(flat))
            lines = self._lines(tensor, low * deep + start, low * deep + end, row_order)
            flat[start:end] = torch.from_numpy(self._dequantise(tensor, lines))
        return out

    def has_blocks(self, name: str) -> bool:
        """Whether the tensor is a matrix stored in 4-bit blocks."""
        tensor = self.tensors[name]
        return tensor.kind in FOUR_BITS and len(tensor.shape) == 2

    def blocks(self, name: str, row_order: np.ndarray | None, low: int, high: int) -> Blocks:
        """Rows [low, high) of a tensor that `has_blocks`, as its blocks; `row_order` as in `read`."""
        tensor = self.tensors[name]
        return read_blocks(self._lines(tensor, low, high, row_order), tensor.kind)

    def _lines(self, tensor: GGUFTensor, low: int, high: int, row_order: np.ndarray | None = None) -> np.ndarray:
        """[high - low, bytes]: lines as the file has them, one per row of the last dimension."""
        size = tensor.size_bytes // math.prod(tensor.shape[:-1])
        if row_order is None:
            return read_bytes(self.path, tensor.offset + low * size, (high - low) * size).reshape(high - low, size)
        order = row_order[low:high]
        first, last = int(order.min()), int(order.max()) + 1
        return self._lines(tensor, first, last)[order - first]

    def _dequantise(self, tensor: GGUFTensor, rows: np.ndarray) -> np.ndarray:
        if tensor.kind is gguf.GGMLQuantizationType.F64:
            return rows.view(np.float64)
        try:
            return gguf.quants.dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.kind.name}, which the gguf package "
                "cannot dequantise; use a file quantised as Q8_0, Q6_K, Q5_K or Q4_K."
            ) from error


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}; check the path.") from error
    except ValueError as error:
        raise ModelFormatError(f"{path} is empty; download it again.") from error
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror}.") from error


class _Header:
    """One pass over the header, every read checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        if data[:4] != b"GGUF":
            raise ModelFormatError(f"{path} is no GGUF file: it begins with {data[:4]!r} instead of b'GGUF'.")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{path} has GGUF version {version} (or big-endian data); allowed: 2 and 3.")
        tensor_count, pair_count = self._scalar("<Q"), self._scalar("<Q")
        self.metadata = self._pairs(pair_count)
        entries = [self._tensor_entry() for _ in range(self._plausible(tensor_count))]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelFormatError(f"{path}: general.alignment is {alignment!r}; allowed: a power of two.")
        start = -(-self._at // alignment) * alignment
        self.tensors = [self._placed(entry, start) for entry in entries]

    def _pairs(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(self._plausible(count)):
            key = self._string()
            pairs[key] = self._value(self._scalar("<I"))
        return pairs

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._scalar("<I")
        shape = tuple(self._scalar("<Q") for _ in range(self._plausible(dimensions)))
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def _placed(self, entry: tuple[str, tuple[int, ...], int, int], start: int) -> GGUFTensor:
        name, shape, number, offset = entry
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise UnsupportedModel(
                f"{self._path}: tensor {name} has the unknown type {number}; a newer gguf may know it."
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for extent in shape:
            count *= extent
        if not shape or count == 0 or shape[-1] % block:
            raise ModelFormatError(f"{self._path}: tensor {name} has shape {shape}, impossible for {kind.name}.")
        return GGUFTensor(name, shape, kind, start + offset, count // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelFormatError(f"{self._path}: unknown metadata type {kind} at byte {self._at}.")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._scalar("<I"), self._plausible(self._scalar("<Q"))
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        code = _SCALARS[kind][1]
        raw = self._take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _string(self) -> str:
        raw = self._take(self._scalar("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self._path}: text at byte {self._at} is not UTF-8.") from error

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ModelFormatError(
                f"{self._path} is cut short: its header runs past the end of the file ({len(self._data)} "
                "bytes); download it again."
            )
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _plausible(self, count: int) -> int:
        """`count` items of at least one byte each must fit the rest of the file."""
        if count > len(self._data) - self._at:
            raise ModelFormatError(
                f"{self._path} is cut short or damaged: it announces {count} items at byte {self._at} of "
                f"{len(self._data)}; download it again."
            )
        return count
