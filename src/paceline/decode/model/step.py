"""One ragged pass, described: spans of different lengths for many sequences, flattened into rows.

A span is a run of tokens of one sequence at known positions: a prefill chunk, a plain step (one token), or a
verify block (the last committed token and a proposal hung on it, chain or tree). `build_inputs` lays the spans
out as rows and prepares once what every layer needs: positions, cache rows, attention groups and masks.

What keeps a row's result independent of the other rows in the pass (design: exactness 4): rows are padded to
the multiple of the model's `RowPolicy`, a prefill chunk is always a matrix product of its own (its size depends
on its request alone), queries of a sequence are padded to the same multiple, and the keys to whole blocks under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KV_BLOCK", "AttentionGroup", "Geometry", "Ring", "RowPolicy", "Span", "StepInputs", "build_inputs"]

KV_BLOCK = 512  # the key block of PyTorch's CPU flash attention; cache capacity is a multiple of it


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in one pass.

    slot      cache slot of the sequence
    start     position of tokens[0]; everything before it is committed in the cache
    parents   None for consecutive tokens; for a tree parents[i] is the row of this span that row i follows
              (row 0 has parent -1)
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


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """How many rows a pass must have for a row's bits not to depend on the others.

    multiple  rows (and queries of a sequence) are padded to a multiple of this
    tile      up to this many rows independence was tried; deterministic mode cuts larger products into tiles
    kv_block  keys of a sequence are padded to a multiple of this
    proved    False where no padding tried made the rows independent on this machine
    """

    multiple: int = 1
    tile: int = 32
    kv_block: int = KV_BLOCK
    proved: bool = True


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
        return cls(window, _round_up(window - 1 + KV_BLOCK, KV_BLOCK))


@dataclass(frozen=True, slots=True)
class Geometry:
    """What `build_inputs` must know of the model.

    group      query heads per KV head
    ring       storage of the layers that look back through a window, None where all see everything
    long_from  sequences that may grow past this many tokens turn by the second of the model's two rotations
    """

    kv_heads: int
    group: int
    dtype: torch.dtype
    device: torch.device
    ring: Ring | None = None
    long_from: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences in neighbouring cache slots whose attention is one call.

    rows    [slots * width] row of each query (padding and idle slots repeat row 0), None where the pass's
            rows are already laid out so
    back    (rows that belong to this group, the place of each among the padded queries), None likewise
    mask    [slots, 1, group * width, kv_len - past] additive, over the keys from `past` on
    ring_mask   likewise over the rows of a ring, the first min(kv_len, ring rows)
    past    keys before this one are seen by every query and need no mask (a prompt chunk behind others)
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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A pass, ready for every layer.

    token_ids, positions  [padded]
    turned_long [padded] 1 where the second rotation is meant, None where the model has but one
    real        rows that carry a token, None where they are the first `tokens`
    tokens      how many rows carry a token
    cache_slots, cache_positions  [tokens] where the keys and values of each go
    pieces      row ranges that are matrix products of their own
    wanted      [logit rows, padded] rows that need logits, None where all rows do
    head_pieces row ranges of the LM head's products
    logits_of   for each span, in the order given: first logit row and how many
    rows_of     likewise for rows
    """

    token_ids: Tensor
    positions: Tensor
    real: Tensor | None
    tokens: int
    cache_slots: Tensor
    cache_positions: Tensor
    pieces: tuple[tuple[int, int], ...]
    groups: tuple[AttentionGroup, ...]
    wanted: Tensor | None
    head_pieces: tuple[tuple[int, int], ...]
    logits_of: tuple[tuple[int, int], ...]
    rows_of: tuple[tuple[int, int], ...]
    turned_long: Tensor | None = None


class _Layout:
    """Rows as they are laid out, one span after another."""

    def __init__(self, capacity: int, multiple: int, long_from: int | None) -> None:
        self.capacity, self.multiple, self.long_from = capacity, multiple, long_from
        self.turned_long: list[int] = []
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.cache_slots: list[int] = []
        self.cache_positions: list[int] = []
        self.real: list[int] = []

    def add(self, span: Span) -> tuple[int, int]:
        first, width = len(self.ids), len(span.tokens)
        assert span.start + width <= self.capacity, f"span ends at {span.start + width} of {self.capacity}"
        self.ids += span.tokens
        self.positions += [span.start + depth for depth in _depths(span)]
        if self.long_from is not None:
            self.turned_long += [int(max(span.limit, span.start + width) > self.long_from)] * width
        self.cache_slots += [span.slot] * width
        self.cache_positions += range(span.start, span.start + width)
        self.real += range(first, first + width)
        return first, width

    def pad(self, first: int = 0) -> None:
        missing = -(len(self.ids) - first) % self.multiple
        self.ids += [0] * missing
        self.positions += [0] * missing
        if self.long_from is not None:
            self.turned_long += [0] * missing


def build_inputs(
    spans: Sequence[Span], capacity: int, geometry: Geometry, policy: RowPolicy, tiled: bool = False
) -> StepInputs:
    """Lay `spans` out as rows, decode and verify spans first, prefill chunks after them.

    `capacity` is the cache's tokens per slot; `tiled` (deterministic mode) cuts products into `policy.tile` rows.
    """
    layout = _Layout(capacity, policy.multiple, geometry.long_from)
    decode = sorted((i for i, s in enumerate(spans) if not s.prefill), key=lambda i: spans[i].slot)
    prefill = [i for i, s in enumerate(spans) if s.prefill]
    rows_of = [(0, 0)] * len(spans)
    for i in decode:
        rows_of[i] = layout.add(spans[i])
    layout.pad()
    pieces = _tiles(len(layout.ids), policy, tiled)
    for i in prefill:
        first = len(layout.ids)
        rows_of[i] = layout.add(spans[i])
        layout.pad(first)
        pieces.append((first, len(layout.ids)))
    members = [[i] for i in prefill] + _merge(decode, spans, policy)
    logits_of, wanted = _wanted(spans, rows_of)
    count = len(wanted)
    wanted += [0] * (-count % policy.multiple)
    total = len(layout.ids)
    alone = total if len(members) == 1 else None
    all_rows = not prefill and wanted[:count] == list(range(count)) and len(wanted) == total
    device = geometry.device
    dense = layout.real[-1] == len(layout.real) - 1
    return StepInputs(
        token_ids=torch.tensor(layout.ids, device=device),
        positions=torch.tensor(layout.positions, device=device),
        real=None if dense else torch.tensor(layout.real, device=device),
        tokens=len(layout.real),
        cache_slots=torch.tensor(layout.cache_slots, device=device),
        cache_positions=torch.tensor(layout.cache_positions, device=device),
        pieces=tuple(pieces),
        groups=tuple(
            _group([spans[i] for i in m], [rows_of[i] for i in m], geometry, policy, alone)
            for m in members
        ),
        wanted=None if all_rows else torch.tensor(wanted, dtype=torch.int64, device=device),
        head_pieces=tuple(_tiles(len(wanted), policy, tiled)),
        logits_of=tuple(logits_of),
        rows_of=tuple(rows_of),
        turned_long=None if geometry.long_from is None else torch.tensor(layout.turned_long, device=device),
    )


def _depths(span: Span) -> Sequence[int]:
    if span.parents is None:
        return range(len(span.tokens))
    depths: list[int] = []
    for parent in span.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _tiles(rows: int, policy: RowPolicy, tiled: bool) -> list[tuple[int, int]]:
    size = policy.tile if tiled and rows > policy.tile else max(rows, 1)
    return [(low, min(low + size, rows)) for low in range(0, rows, size)]


def _wanted(
    spans: Sequence[Span], rows_of: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[int]]:
    wanted: list[int] = []
    logits_of = [(0, 0)] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: rows_of[i]):
        first, width = rows_of[i]
        take = {"all": width, "last": 1, "none": 0}[spans[i].want]
        logits_of[i] = (len(wanted), take)
        wanted += range(first + width - take, first + width)
    return logits_of, wanted


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_CALL_COST = 64 * 512  # query-key pairs whose work equals the overhead of one more attention call


def _merge(decode: Sequence[int], spans: Sequence[Span], policy: RowPolicy) -> list[list[int]]:
    """Group spans (in slot order) into attention calls: merged while padding costs less than another call."""

    def cost(members: Sequence[int]) -> int:
        slots = spans[members[-1]].slot - spans[members[0]].slot + 1
        width = max(_round_up(len(spans[i].tokens), policy.multiple) for i in members)
        keys = max(_round_up(spans[i].start + len(spans[i].tokens), policy.kv_block) for i in members)
        return slots * width * keys

    groups: list[list[int]] = []
    for i in decode:
        if groups and cost([*groups[-1], i]) <= cost(groups[-1]) + cost([i]) + _CALL_COST:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _group(
    spans: Sequence[Span],
    rows_of: Sequence[tuple[int, int]],
    geometry: Geometry,
    policy: RowPolicy,
    total_rows: int | None,  # of the pass, where this group is all of it
) -> AttentionGroup:
    low, high = spans[0].slot, spans[-1].slot + 1
    width = max(_round_up(len(s.tokens), policy.multiple) for s in spans)
    past = _unmasked(spans[0], geometry)
    kv_len = max(_round_up(s.start + len(s.tokens), 1 if past else policy.kv_block) for s in spans)
    device = geometry.device
    query_rows = [0] * ((high - low) * width)
    last_key = torch.full((high - low, width), past)  # idle queries look at one key alone
    places: list[int] = []
    own: list[int] = []
    for span, (first, count) in zip(spans, rows_of, strict=True):
        base = (span.slot - low) * width
        query_rows[base : base + count] = range(first, first + count)
        places += range(base, base + count)
        own += range(first, first + count)
        last_key[span.slot - low, :count] = torch.arange(span.start, span.start + count)
    seen = torch.arange(past, kv_len) <= last_key[:, :, None]
    for span in spans:
        if span.parents is not None:
            _hide_other_branches(seen[span.slot - low], span)
    ring_mask = None
    if geometry.ring is not None:
        ring_mask = _additive(_seen_in_ring(seen, spans, geometry.ring), geometry)
    laid_out = total_rows == len(query_rows) and own == places
    return AttentionGroup(
        slot_low=low,
        slot_high=high,
        width=width,
        kv_len=kv_len,
        rows=None if laid_out else torch.tensor(query_rows, device=device),
        back=None if laid_out else (torch.tensor(own, device=device), torch.tensor(places, device=device)),
        mask=_additive(seen, geometry),
        ring_mask=ring_mask,
        past=past,
    )


def _additive(seen: Tensor, geometry: Geometry) -> Tensor:
    """[slots, width, keys] of what each query sees, as a mask [slots, 1, group * width, keys] to add to scores."""
    mask = torch.zeros(seen.shape, dtype=geometry.dtype).masked_fill_(~seen, float("-inf"))
    mask = mask[:, None].expand(-1, geometry.group, -1, -1).reshape(len(seen), 1, -1, seen.shape[-1])
    return mask.to(geometry.device)


def _seen_in_ring(seen: Tensor, spans: Sequence[Span], ring: Ring) -> Tensor:
    """`seen` [slots, width, kv_len] over rows of the ring and cut to the window, by position.

    After the pass has written up to `end`, row j holds the last token before `end` that is j modulo the ring's
    rows. A stale row, rolled back or of an older sequence, is thus read as a token far behind, outside the window.
    """
    rows = torch.arange(min(ring.rows, seen.shape[-1]))
    out = torch.zeros(*seen.shape[:2], len(rows), dtype=torch.bool)
    out[:, :, 0] = True  # idle queries
    low = spans[0].slot
    for span in spans:
        count, end = len(span.tokens), span.start + len(span.tokens)
        held = end - 1 - (end - 1 - rows) % ring.rows
        depths = torch.tensor(list(_depths(span)))
        own = (held - span.start).clamp(0, count - 1)
        positions = torch.where(held < span.start, held, span.start + depths[own])
        near = (held >= 0) & (positions > (span.start + depths - ring.window)[:, None])
        out[span.slot - low, :count] = seen[span.slot - low][:count, held.clamp(min=0)] & near
    return out


def _unmasked(span: Span, geometry: Geometry) -> int:
    """Keys that need no mask: those before a prompt chunk. Attention over them alone is some 7 % faster."""
    plain = geometry.ring is None and geometry.device.type == "cpu"
    return span.start if span.prefill and plain else 0


def _hide_other_branches(seen: Tensor, span: Span) -> None:
    """Row i of a tree sees the committed tokens and its own ancestors (and itself), nothing else of the block."""
    assert span.parents is not None
    width = len(span.tokens)
    own = torch.zeros(width, width, dtype=torch.bool)
    for row, parent in enumerate(span.parents):
        if parent >= 0:
            own[row] = own[parent]
        own[row, row] = True
    seen[:width, span.start : span.start + width] = own
