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

import torch
from torch import Tensor

from paceline.decode.model.branches import lay_out
from paceline.decode.model.calls import attention_calls
from paceline.decode.model.row_lists import RowLists, row_lists
from paceline.decode.model.spans import KV_BLOCK, AttentionGroup, Geometry, Level, Ring, RowPolicy, Span

__all__ = ["KV_BLOCK", "AttentionGroup", "Geometry", "Level", "Ring", "RowPolicy", "Span", "StepInputs", "build_inputs"]


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
    lists       the pass by rows, for decoders that take it so (`Geometry.together`); then there are no padding rows,
                `positions` are not given and neither are pieces and groups
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
    lists: RowLists | None = None


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
        if span.level is not None:
            self.positions += [span.level.base + len(above) for above in span.level.ancestors]
        else:
            depths = range(width) if span.parents is None else lay_out(span.parents).depths
            self.positions += [span.start + depth for depth in depths]
        if self.long_from is not None:
            self.turned_long += [int(max(span.limit, span.start + width) > self.long_from)] * width
        self.cache_slots += [span.slot] * width
        self.cache_positions += [span.start + place for place in span.places(range(width))]
        self.real += range(first, first + width)
        return first, width

    def pad(self, first: int = 0, rows: int | None = None) -> None:
        """Fill up from row `first` on, to `rows` of them or to the multiple."""
        have = len(self.ids) - first
        missing = -have % self.multiple if rows is None else rows - have
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
    if geometry.together is not None:
        return _by_rows(spans, capacity, geometry.together, geometry.long_from)
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
        layout.pad(first, policy.padded(len(spans[i].tokens)))
        pieces.append((first, len(layout.ids)))
    logits_of, wanted, head_pieces = _wanted(spans, rows_of, policy, tiled)
    count = max((first + rows for first, rows in logits_of), default=0)
    total = len(layout.ids)
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
        groups=attention_calls(
            [(spans[i], rows_of[i][0]) for i in decode],
            [(spans[i], rows_of[i][0]) for i in prefill],
            total,
            geometry,
            policy,
        ),
        wanted=None if all_rows else torch.tensor(wanted, dtype=torch.int64, device=device),
        head_pieces=tuple(head_pieces),
        logits_of=tuple(logits_of),
        rows_of=tuple(rows_of),
        turned_long=None if geometry.long_from is None else torch.tensor(layout.turned_long, device=device),
    )


def _by_rows(spans: Sequence[Span], capacity: int, together: int, long_from: int | None) -> StepInputs:
    for span in spans:
        end = span.start + len(span.tokens)
        assert end <= capacity, f"span ends at {end} of {capacity}"
    lists = row_lists(spans, together, long_from)
    none = torch.empty(0, dtype=torch.int64)
    return StepInputs(
        token_ids=torch.tensor(lists.ids),
        positions=none,
        real=None,
        tokens=len(lists.ids),
        cache_slots=none,
        cache_positions=none,
        pieces=(),
        groups=(),
        wanted=None,
        head_pieces=(),
        logits_of=lists.logits_of,
        rows_of=lists.rows_of,
        lists=lists,
    )


def _tiles(rows: int, policy: RowPolicy, tiled: bool) -> list[tuple[int, int]]:
    size = policy.tile if tiled and rows > policy.tile else max(rows, 1)
    return [(low, min(low + size, rows)) for low in range(0, rows, size)]


def _wanted(
    spans: Sequence[Span], rows_of: Sequence[tuple[int, int]], policy: RowPolicy, tiled: bool
) -> tuple[list[tuple[int, int]], list[int], list[tuple[int, int]]]:
    """Where each span's logits are, the rows they come from, and the head's products over them.

    A prompt chunk that wants all its logits is a product of its own, as it is in the layers.
    """
    wanted: list[int] = []
    logits_of = [(0, 0)] * len(spans)
    whole = {i for i, span in enumerate(spans) if span.prefill and span.want == "all"}
    pieces: list[tuple[int, int]] = []

    def take(i: int) -> None:
        first, width = rows_of[i]
        rows = {"all": width, "last": 1, "none": 0}[spans[i].want]
        logits_of[i] = (len(wanted), rows)
        wanted.extend(range(first + width - rows, first + width))

    for i in sorted(set(range(len(spans))) - whole, key=lambda i: rows_of[i]):
        take(i)
    wanted += [0] * (-len(wanted) % policy.multiple)
    pieces += _tiles(len(wanted), policy, tiled)
    for i in sorted(whole, key=lambda i: rows_of[i]):
        first = len(wanted)
        take(i)
        wanted += [0] * (-len(wanted) % policy.multiple)
        pieces.append((first, len(wanted)))
    return logits_of, wanted, pieces
