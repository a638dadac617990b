"""The KV cache: slots of tokens, changed only by transactions.

Ownership

    KVCache        the storage and, per slot, how many tokens are committed
    Transaction    one pass: reserves rows past the committed ones, then commits a path of each or leaves them;
                   leaving without a commit rolls back
    Engine         which request has which slot
    Drafter        of the target's cache nothing; one that declares `shares_target` may, in `propose` (so between
                   two passes of the engine), open a transaction, write past the committed rows of its own
                   sequences' slots, and leave it without a commit. What it wrote is then nobody's, as any
                   rolled-back row; it erases what is not finite

A rolled-back row needs no erasing: it lies past the committed length and the next pass overwrites it before any
query can see it. `check` verifies the books; the engine calls it whenever it is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from paceline.decode.layer_store import LayerStore, RingStore
from paceline.decode.model.step import KV_BLOCK, Ring

__all__ = ["KVCache", "Transaction"]


class KVCache:
    """Keys and values of `slots` sequences of up to `limit` tokens in `layers` layers.

    Capacity grows in steps of KV_BLOCK when a request needs it, so short requests do not pay for long contexts.
    `rings` names, by layer, the ring of those that look back through a window (`layer_store.py`).
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        rings: Sequence[Ring | None] | None = None,
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.slots, self.limit = slots, _blocks(limit)
        self.dtype, self.device = dtype, device
        self.capacity = 0
        shape = (slots, kv_heads, head_dim, dtype, device)
        self.storage = [
            LayerStore(*shape) if ring is None else RingStore(ring, *shape) for ring in rings or [None] * layers
        ]
        self.largest_write = min([self.limit, *(ring.largest_write for ring in rings or () if ring)])
        self._committed = [0] * slots
        self._written = [0] * slots  # the highest token ever written in a slot's present life, and one
        self._free = list(range(slots))
        self._open: Transaction | None = None

    def allocate(self, tokens: int) -> int:
        """The lowest free slot, with room for `tokens`. Low slots first keep attention calls dense."""
        assert self._free, "allocate on a full cache; the scheduler counts free slots first"
        self.reserve_capacity(tokens)
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} released twice"
        self._committed[slot] = self._written[slot] = 0
        self._free.append(slot)

    def erase(self, slot: int, first: int = 0) -> None:
        """Zero a slot from token `first` on, where it may not be finite: a masked NaN would still poison sums."""
        for layer in self.storage:
            layer.erase(slot, first, self._written[slot])

    def committed(self, slot: int) -> int:
        return self._committed[slot]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(layer.data.numel() * layer.data.element_size() for layer in self.storage)

    def write(self, layer: int, slots: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Put keys and values `rows` [n, 2 * kv_heads * head_dim] at (slot, position) [n] each."""
        self.storage[layer].write(slots, positions, rows)

    def keys_values(self, layer: int, low: int, high: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """Views [high - low, kv_heads, kv_len, head_dim] of slots low to high; a ring has no more than its rows."""
        return self.storage[layer].read(low, high, kv_len)

    def transaction(self) -> Transaction:
        assert self._open is None, "a transaction is already open"
        self._open = Transaction(self)
        return self._open

    def resumable(self, slot: int, tokens: int) -> int:
        """The greatest length up to `tokens` to which a slot can be truncated: `tokens`, or 0 where a ring has
        pushed out what the next query would look at.
        """
        oldest = max(layer.oldest_resume(self._written[slot]) for layer in self.storage)
        return tokens if tokens >= oldest else 0

    def truncate(self, slot: int, tokens: int) -> None:
        """Forget committed tokens past `tokens` (a draft model steps back to what the target kept)."""
        assert tokens <= self._committed[slot], f"slot {slot} holds {self._committed[slot]}, not {tokens}"
        assert tokens == self.resumable(slot, tokens), f"slot {slot} cannot go back to {tokens} tokens"
        if not tokens:
            self._written[slot] = 0
        self._committed[slot] = tokens

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless exactly the slots `held` are in use and no transaction is open."""
        assert self._open is None, "a transaction was left open"
        used = sorted(set(range(self.slots)) - set(self._free))
        assert used == sorted(held), f"slots in use {used}, held by sequences {sorted(held)}"
        assert len(set(self._free)) == len(self._free), f"a slot is free twice: {self._free}"
        stale = [s for s in self._free if self._committed[s]]
        assert not stale, f"free slots {stale} still hold committed tokens"

    def reserve_capacity(self, tokens: int) -> None:
        """Grow every slot to hold `tokens`, moving what is committed."""
        wanted = _blocks(tokens)
        assert wanted <= self.limit, f"{tokens} tokens asked of a cache limited to {self.limit}"
        if wanted <= self.capacity:
            return
        for layer in self.storage:
            layer.grow(wanted)
        self.capacity = wanted


class Transaction:
    """Rows written past the committed tokens of some slots in one pass. Use as a context manager."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._reserved: dict[int, int] = {}

    def reserve(self, slot: int, rows: int) -> int:
        """Reserve `rows` after the committed tokens of `slot`; returns the position of the first."""
        start = self._cache.committed(slot)
        assert slot not in self._reserved, f"slot {slot} reserved twice in one pass"
        assert start + rows <= self._cache.capacity, f"slot {slot}: {start}+{rows} > {self._cache.capacity}"
        assert rows <= self._cache.largest_write, f"slot {slot}: {rows} rows, {self._cache.largest_write} at most"
        self._cache._written[slot] = max(self._cache._written[slot], start + rows)
        self._reserved[slot] = rows
        return start

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the reserved rows `path` (offsets), in that order; the rest is rolled back.

        What lies in place already is not copied: nothing for a chain, and of a tree only what left the trunk.
        """
        rows = self._reserved.pop(slot)
        assert all(0 <= r < rows for r in path), f"path {path} leaves the {rows} reserved rows"
        start = self._cache.committed(slot)
        in_place = next((i for i, row in enumerate(path) if row != i), len(path))
        if in_place < len(path):
            for layer in self._cache.storage:
                layer.move(slot, start + in_place, [row - in_place for row in path[in_place:]])
        self._cache._committed[slot] = start + len(path)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserved.clear()
        self._cache._open = None


def _blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK) * KV_BLOCK
