"""The attention calls of a pass: which queries go together, what each sees, what must lie where before it.

Sequences in neighbouring cache slots share a call while padding costs less than another. A tree's branches come
first, each in a call of its own (`branches.py`), then its trunk together with chains and plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.decode.model.branches import TreeLayout, lay_out
from paceline.decode.model.spans import AttentionGroup, Geometry, Ring, RowPolicy, Span

__all__ = ["attention_calls"]


def attention_calls(
    decode: Sequence[tuple[Span, int]],  # spans and their first rows, in slot order
    prefill: Sequence[tuple[Span, int]],  # likewise; each is a call of its own
    total_rows: int,  # of the pass
    geometry: Geometry,
    policy: RowPolicy,
) -> tuple[AttentionGroup, ...]:
    """The calls of every layer, in order."""
    calls = [[_chunk(span, first, geometry, policy)] for span, first in prefill]
    calls += _decode_calls(decode, policy)
    return tuple(_group(call, geometry, policy, total_rows if len(calls) == 1 else None) for call in calls)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_CALL_COST = 64 * 512  # query-key pairs whose work equals the overhead of one more attention call


@dataclass(frozen=True, slots=True)
class _Queries:
    """One sequence in one attention call: its rows, the last key each sees and, for a `Level`, further keys.

    end      behind the last place this pass writes in the slot
    past     keys before this one are seen by all and need no mask
    placed   (row, cache position) to be written before the call
    width    queries to pad to at least, where it is a prompt chunk
    """

    slot: int
    rows: Sequence[int]
    last_keys: Sequence[int]
    end: int
    further: Sequence[Sequence[int]] | None = None
    placed: Sequence[tuple[int, int]] = ()
    past: int = 0
    width: int = 0

    @property
    def keys(self) -> int:
        return 1 + max(max(self.last_keys), max((max(keys) for keys in self.further or ()), default=0))


def _chunk(span: Span, first: int, geometry: Geometry, policy: RowPolicy) -> _Queries:
    return replace(
        _queries(span, first), past=_unmasked(span, geometry, policy), width=policy.padded(len(span.tokens))
    )


def _queries(span: Span, first: int) -> _Queries:
    """The rows of a span without branches."""
    rows, end = range(first, first + len(span.tokens)), span.start + len(span.tokens)
    if span.level is None:
        return _Queries(span.slot, rows, range(span.start, end), end)
    further = [[*above, span.start + i] for i, above in enumerate(span.level.ancestors)]
    return _Queries(span.slot, rows, [span.level.base - 1] * len(rows), end, further)


def _decode_calls(spans: Sequence[tuple[Span, int]], policy: RowPolicy) -> list[list[_Queries]]:
    """Attention calls over spans (with their first rows) in slot order: branches of trees, then all the rest."""
    rest: list[_Queries] = []
    branches: list[list[_Queries]] = []  # the first of every tree, the second of every tree, ...
    for span, first in spans:
        if span.parents is None:
            rest.append(_queries(span, first))
            continue
        layout = lay_out(span.parents)
        for index, branch in enumerate(layout.branches):
            if index == len(branches):
                branches.append([])
            branches[index].append(_tree_queries(span, first, layout, branch.rows, branch.path))
        rest.append(_tree_queries(span, first, layout, layout.trunk, layout.replaced))
    return [call for turn in [*branches, rest] for call in _merge(turn, policy)]


def _tree_queries(
    span: Span, first: int, layout: TreeLayout, rows: Sequence[int], placed: Sequence[int]
) -> _Queries:
    return _Queries(
        span.slot,
        [first + row for row in rows],
        [span.start + layout.depths[row] for row in rows],
        span.start + len(span.tokens),
        placed=[(first + row, span.start + layout.depths[row]) for row in placed],
    )


def _merge(queries: Sequence[_Queries], policy: RowPolicy) -> list[list[_Queries]]:
    """Group sequences (in slot order) into attention calls: merged while padding costs less than another call."""

    def cost(members: Sequence[_Queries]) -> int:
        slots = members[-1].slot - members[0].slot + 1
        width = max(_round_up(len(q.rows), policy.multiple) for q in members)
        return slots * width * max(_round_up(q.keys, policy.kv_block) for q in members)

    groups: list[list[_Queries]] = []
    for q in queries:
        if groups and cost([*groups[-1], q]) <= cost(groups[-1]) + cost([q]) + _CALL_COST:
            groups[-1].append(q)
        else:
            groups.append([q])
    return groups


def _group(
    members: Sequence[_Queries],
    geometry: Geometry,
    policy: RowPolicy,
    total_rows: int | None,  # of the pass, where this group is all of it
) -> AttentionGroup:
    low, high = members[0].slot, members[-1].slot + 1
    width = max(max(_round_up(len(q.rows), policy.multiple), q.width) for q in members)
    past = members[0].past
    kv_len = max(_round_up(q.keys, 1 if past else policy.kv_block) for q in members)
    device = geometry.device
    query_rows = [0] * ((high - low) * width)
    last_key = torch.full((high - low, width), past)  # idle queries look at one key alone
    places: list[int] = []
    own: list[int] = []
    for q in members:
        base, count = (q.slot - low) * width, len(q.rows)
        query_rows[base : base + count] = q.rows
        places += range(base, base + count)
        own += q.rows
        last_key[q.slot - low, :count] = torch.tensor(q.last_keys)
    seen = torch.arange(past, kv_len) <= last_key[:, :, None]
    for q in members:
        for i, keys in enumerate(q.further or ()):
            seen[q.slot - low, i, list(keys)] = True
    ring_mask = None
    if geometry.ring is not None:
        ring_mask = _additive(_seen_in_ring(members, seen, geometry.ring), geometry)
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
        placed=_placed(members, device),
    )


def _additive(seen: Tensor, geometry: Geometry) -> Tensor:
    """[slots, width, keys] of what each query sees, as a mask [slots, 1, group * width, keys] to add to scores."""
    mask = torch.zeros(seen.shape, dtype=geometry.dtype).masked_fill_(~seen, float("-inf"))
    mask = mask[:, None].expand(-1, geometry.group, -1, -1).reshape(len(seen), 1, -1, seen.shape[-1])
    return mask.to(geometry.device)


def _seen_in_ring(members: Sequence[_Queries], seen: Tensor, ring: Ring) -> Tensor:
    """`seen` [slots, width, kv_len] over rows of the ring and cut to the window, by position.

    After the pass has written up to `end`, row j holds the last token before `end` that is j modulo the ring's
    rows. A stale row, rolled back or of an older sequence, is thus read as a token far behind, outside the window.
    """
    rows = torch.arange(min(ring.rows, seen.shape[-1]))
    out = torch.zeros(*seen.shape[:2], len(rows), dtype=torch.bool)
    out[:, :, 0] = True  # idle queries
    low = members[0].slot
    for q in members:
        held = q.end - 1 - (q.end - 1 - rows) % ring.rows
        last = torch.tensor(q.last_keys)[:, None]
        further = q.further or [()] * len(q.rows)
        oldest = last + torch.tensor([len(keys) for keys in further])[:, None] - ring.window + 1
        out[q.slot - low, : len(q.rows)] = (held >= 0) & (held <= last) & (held >= oldest)
        for i, keys in enumerate(further):  # the first of them is at the position after the last key
            first = max(0, int(oldest[i, 0] - last[i, 0]) - 1)
            out[q.slot - low, i, [key % ring.rows for key in keys[first:]]] = True
    return out


def _unmasked(span: Span, geometry: Geometry, policy: RowPolicy) -> int:
    """Keys that need no mask: those before a prompt chunk. Attention over them alone is some 7 % faster.

    The two parts are joined by other sums than one call makes, so a token's bits depend on where its chunk began:
    done only where they depend on it anyway.
    """
    plain = geometry.ring is None and geometry.device.type == "cpu" and not policy.chunk_rows
    return span.start if plain else 0


def _placed(members: Sequence[_Queries], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    moves = [(row, q.slot, position) for q in members for row, position in q.placed]
    if not moves:
        return None
    rows, slots, positions = torch.tensor(moves, device=device).unbind(1)
    return rows, slots, positions
