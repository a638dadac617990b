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

Memory is counted in blocks of tokens. A slot takes blocks as its tokens need them, out of a budget; what it gives
back goes back to the system (`lazy_memory.py`). Who must yield when there are none is decided in `room.py`.

A rolled-back row needs no erasing: it lies past the committed length and the next pass overwrites it before any
query can see it. `check` verifies the books; the engine calls it whenever it is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from paceline.decode.layer_store import LayerStore, RingStore
from paceline.decode.lazy_memory import can_be_lazy
from paceline.decode.model.step import KV_BLOCK, Ring

__all__ = ["MIN_SHARED", "KVCache", "Transaction"]

MIN_SHARED = 16  # tokens from which a common beginning of two sequences is worth keeping and looking for


class KVCache:
    """Keys and values of `slots` sequences of up to `limit` tokens in `layers` layers.

    In host memory every slot has the addresses of `limit` tokens and the memory of the blocks it was granted;
    elsewhere the capacity of all slots grows in whole blocks when a request needs it. `rings` names, by layer, the
    ring of those that look back through a window (`layer_store.py`).

    block    tokens of a block, a part of KV_BLOCK
    budget   bytes that all slots together may take; None is all there are
    """

    block = KV_BLOCK

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
        self.slots, self.limit = slots, -(-limit // KV_BLOCK) * KV_BLOCK  # keys are padded to whole KV_BLOCKs
        self.dtype, self.device = dtype, device
        self.capacity = 0
        shape = (slots, kv_heads, head_dim, dtype, device)
        self.storage = [
            LayerStore(*shape) if ring is None else RingStore(ring, *shape) for ring in rings or [None] * layers
        ]
        self.largest_write = min([self.limit, *(ring.largest_write for ring in rings or () if ring)])
        self.budget: int | None = None
        self._committed = [0] * slots
        self._granted = [0] * slots  # tokens, whole blocks
        self._written = [0] * slots  # the highest token ever written in a slot's present life, and one
        self._free = list(range(slots))
        self._open: Transaction | None = None

    # -- slots and their memory ----------------------------------------------------------------------------

    def allocate(self, tokens: int) -> int:
        """The lowest free slot, with room for `tokens`. Low slots first keep attention calls dense."""
        assert self._free, "allocate on a full cache; the scheduler counts free slots first"
        slot = min(self._free)
        self.take(slot)
        granted = self.grant(slot, tokens)
        assert granted, f"no room for {tokens} tokens; the scheduler counts free memory first"
        return slot

    def take(self, slot: int) -> None:
        """Put the free slot `slot` to use."""
        self._free.remove(slot)

    def grant(self, slot: int, tokens: int) -> bool:
        """Blocks for `tokens` of a slot; False, and nothing taken, where the budget does not have them."""
        if tokens <= self._granted[slot]:
            return True
        if self.cost(tokens) - self.cost(self._granted[slot]) > self.free_bytes:
            return False
        self.reserve_capacity(tokens)
        self._granted[slot] = self._whole(tokens)
        return True

    def granted(self, slot: int) -> int:
        """Tokens that a slot has memory for."""
        return self._granted[slot]

    def cost(self, tokens: int) -> int:
        """Bytes of the blocks that hold `tokens` of one slot."""
        return sum(layer.nbytes(self._whole(tokens)) for layer in self.storage)

    @property
    def free_bytes(self) -> int:
        budget = self.slots * self.cost(self.limit) if self.budget is None else self.budget
        return budget - self.nbytes

    @property
    def nbytes(self) -> int:
        """What the slots have been granted."""
        return sum(self.cost(tokens) for tokens in self._granted if tokens)

    def shrink(self, slot: int) -> None:
        """Give back the blocks past the committed tokens."""
        kept = self._whole(self._committed[slot])
        if kept < self._granted[slot]:
            self._discard(slot, kept)

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} released twice"
        self._committed[slot] = self._written[slot] = 0
        self._discard(slot, 0)
        self._free.append(slot)

    def copy(self, source: int, slot: int, tokens: int) -> None:
        """The first `tokens` committed tokens of slot `source`, also in `slot`, which has none and has room."""
        assert not self._committed[slot] and tokens <= self._committed[source], f"{source} -> {slot}: {tokens}"
        assert tokens == self.resumable(source, tokens), f"slot {source} cannot be copied from at {tokens} tokens"
        assert tokens <= self._granted[slot], f"slot {slot} has no room for {tokens} tokens"
        for layer in self.storage:
            layer.copy(source, slot, tokens)
        self._committed[slot], self._written[slot] = tokens, self._written[source]

    def move(self, source: int, slot: int) -> None:
        """What slot `source` holds, to the free slot `slot`; its memory counts once."""
        self.take(slot)
        self._granted[slot] = self._granted[source]
        self.copy(source, slot, self._committed[source])
        self.release(source)

    def _discard(self, slot: int, first: int) -> None:
        if self._granted[slot]:
            for layer in self.storage:
                layer.discard(slot, first)
        self._granted[slot] = first

    def is_free(self, slot: int) -> bool:
        return slot in self._free

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block

    # -- tokens --------------------------------------------------------------------------------------------

    def erase(self, slot: int, first: int = 0) -> None:
        """Zero a slot from token `first` on, where it may not be finite: a masked NaN would still poison sums."""
        for layer in self.storage:
            layer.erase(slot, first, min(self._written[slot], self._granted[slot]))

    def committed(self, slot: int) -> int:
        return self._committed[slot]

    @property
    def free_slots(self) -> int:
        return len(self._free)

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
        kept = [s for s in self._free if self._granted[s]]
        assert not kept, f"free slots {kept} still hold memory"
        assert self.free_bytes >= 0, f"{self.nbytes} bytes in use of {self.budget}"

    def reserve_capacity(self, tokens: int) -> None:
        """Addresses for `tokens` in every slot; where addresses are memory, grown as needed, moving what there is."""
        wanted = self._whole(tokens)
        assert wanted <= self.limit, f"{tokens} tokens asked of a cache limited to {self.limit}"
        if wanted <= self.capacity:
            return
        wanted = self.limit if can_be_lazy(self.device) else wanted
        for layer in self.storage:
            layer.grow(wanted)
        self.capacity = wanted

    def touch(self, tokens: int) -> None:
        """Write zeros to the first `tokens` of every slot: memory that was never written reads faster than any."""
        self.reserve_capacity(tokens)
        for layer in self.storage:
            layer.data[:, :, :, :tokens] = 0


class Transaction:
    """Rows written past the committed tokens of some slots in one pass. Use as a context manager."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._reserved: dict[int, int] = {}

    def reserve(self, slot: int, rows: int) -> int:
        """Reserve `rows` after the committed tokens of `slot`; returns the position of the first."""
        start = self._cache.committed(slot)
        assert slot not in self._reserved, f"slot {slot} reserved twice in one pass"
        assert start + rows <= self._cache.limit, f"slot {slot}: {start}+{rows} > {self._cache.limit}"
        assert rows <= self._cache.largest_write, f"slot {slot}: {rows} rows, {self._cache.largest_write} at most"
        granted = self._cache.grant(slot, start + rows)
        assert granted, f"slot {slot}: no memory for {start}+{rows} tokens; the scheduler makes room first"
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

