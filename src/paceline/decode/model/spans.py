"""What a pass is made of, and what `step.py` makes of it: spans, the shape of the model, attention calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.decode.model.branches import lay_out

__all__ = ["KV_BLOCK", "AttentionGroup", "Geometry", "Level", "Ring", "RowPolicy", "Span"]

KV_BLOCK = 512  # the key block of PyTorch's CPU flash attention; cache capacity is a multiple of it


@dataclass(frozen=True, slots=True)
class Level:
    """Rows of a tree whose upper levels lie in the cache already, as a draft model grows it.

    base        tokens before the tree: every row sees them
    ancestors   for each row the cache positions of its ancestors in the tree, which it sees too, and itself
    Keys are masked where they lie, so a row's bits are not those it has in a chain: for drafts, not for targets.
    """

    base: int
    ancestors: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in one pass.

    slot      cache slot of the sequence
    start     position of tokens[0]; everything before it is committed in the cache
    parents   None for consecutive tokens; for a tree parents[i] is the row of this span that row i follows
              (row 0 has parent -1)
    level     the rows are one level of a tree: `start` is where they go, not their position
    want      which rows need logits
    prefill   a chunk of the prompt: computed as a matrix product of its own
    limit     tokens the sequence may grow to; only models whose rotation depends on the length of the text look
    """

    slot: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    want: Literal["all", "last", "none"] = "all"
    prefill: bool = False
    limit: int = 0
    level: Level | None = None

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        """Where these rows lie, counted from the span's first: a tree's rows are not in order."""
        if self.parents is None:
            return rows
        places = lay_out(self.parents).places
        return [places[row] for row in rows]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """How many rows a pass must have for a row's bits not to depend on the others.

    multiple  rows (and queries of a sequence) are padded to a multiple of this
    tile      up to this many rows independence was tried; deterministic mode cuts larger products into tiles
    kv_block  keys of a sequence are padded to a multiple of this
    proved    False where no padding tried made the rows independent on this machine
    chunk_rows   rows to which a prefill chunk is padded, rising; in products and attention of these sizes a row has
              the bits it has alone, so that a token's do not depend on how its prompt was cut. Empty where that
              was not tried or does not hold: then chunks are as long as they are, and their bounds matter
    """

    multiple: int = 1
    tile: int = 32
    kv_block: int = KV_BLOCK
    proved: bool = True
    chunk_rows: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """Rows of the product that computes a prefill chunk of `rows`; more than were tried are not the engine's."""
        least = -(-rows // self.multiple) * self.multiple
        return least if rows <= self.tile else next((size for size in self.chunk_rows if size >= rows), least)


@dataclass(frozen=True, slots=True)
class Ring:
    """Sliding-window storage: token p lies at row p modulo `rows`, and a query at q sees p > q - `window`.

    A pass may write `largest_write` tokens of a sequence: what they push out no query of the pass looks at, nor
    any query that follows a roll-back of the pass.
    """

    window: int
    rows: int

    @property
    def largest_write(self) -> int:
        return self.rows - self.window + 1

    @classmethod
    def holding(cls, window: int) -> Ring:
        """A window and one more block, in whole blocks."""
        return cls(window, -(-(window - 1 + KV_BLOCK) // KV_BLOCK) * KV_BLOCK)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What `build_inputs` must know of the model.

    group      query heads per KV head
    ring       storage of the layers that look back through a window, None where all see everything
    long_from  sequences that may grow past this many tokens turn by the second of the model's two rotations
    together   rows of a sequence that attend together at most, in a decoder that takes passes as `RowLists`; None in
               one that takes padded attention calls
    """

    kv_heads: int
    group: int
    dtype: torch.dtype
    device: torch.device
    ring: Ring | None = None
    long_from: int | None = None
    together: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences in neighbouring cache slots whose attention is one call.

    rows    [slots * width] row of each query (padding and idle slots repeat row 0), None where the pass's
            rows are already laid out so
    back    (rows that belong to this group, the place of each among the padded queries), None likewise
    mask    [slots, 1, group * width, kv_len - past] additive, over the keys from `past` on
    ring_mask   likewise over the rows of a ring, the first min(kv_len, ring rows)
    past    keys before this one are seen by every query and need no mask (a prompt chunk behind others)
    placed  (rows, cache slots, cache positions) whose keys and values are written there before this call, beside
            where they went already; None where all lie in place. Calls are made in order
    """

    slot_low: int
    slot_high: int
    width: int
    kv_len: int
    rows: Tensor | None
    back: tuple[Tensor, Tensor] | None
    mask: Tensor
    ring_mask: Tensor | None = None
    past: int = 0
    placed: tuple[Tensor, Tensor, Tensor] | None = None
