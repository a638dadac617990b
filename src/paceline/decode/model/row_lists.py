"""A pass as lists of rows, for decoders that look at a row's keys one by one and need neither padding nor masks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.decode.model.branches import lay_out
from paceline.decode.model.spans import Span

__all__ = ["RowLists", "row_lists"]


@dataclass(frozen=True, slots=True)
class RowLists:
    """Rows of all spans, one span after another.

    ids        token of each row
    turns      row of the rotation tables: the position, or twice that and which rotation where there are two
    slots, places   where its keys and values go in the cache
    tasks      bounds of runs of rows that attend together: neighbours in one sequence, or one row of a tree
    seen       keys each row sees from the slot's beginning on
    tail_from  [rows + 1] where each row's further keys begin in `tails`
    tails      their places, in the order of the text
    wanted     rows whose logits are computed
    rows_of, logits_of   for each span: its first row, or logit row, and how many
    """

    ids: list[int]
    turns: array[int]
    slots: array[int]
    places: array[int]
    tasks: array[int]
    seen: array[int]
    tail_from: array[int]
    tails: array[int]
    wanted: list[int]
    rows_of: tuple[tuple[int, int], ...]
    logits_of: tuple[tuple[int, int], ...]


def row_lists(
    spans: Sequence[Span],
    together: int,  # rows of a task at most
    long_from: int | None,  # as in `Geometry`
) -> RowLists:
    ids: list[int] = []
    turns, slots, places, tasks, seen = (array("i") for _ in range(5))
    tail_from, tails = array("i", [0]), array("i")
    wanted: list[int] = []
    rows_of, logits_of = [], []
    for span in spans:
        first, width = len(ids), len(span.tokens)
        rows_of.append((first, width))
        count = {"all": width, "last": 1, "none": 0}[span.want]
        logits_of.append((len(wanted), count))
        wanted += range(first + width - count, first + width)
        ids += span.tokens
        slots.extend([span.slot] * width)
        if span.parents is None and span.level is None:
            positions: Sequence[int] = range(span.start, span.start + width)
            places.extend(positions)
            seen.extend(range(span.start + 1, span.start + width + 1))
            tail_from.extend([len(tails)] * width)
            tasks.extend(range(first, first + width, min(together, max(2, -(-width // 2)))))
        else:
            positions = _branching(span, places, seen, tail_from, tails)
            tasks.extend(range(first, first + width))
        if long_from is None:
            turns.extend(positions)
        else:
            long = int(max(span.limit, span.start + width) > long_from)
            turns.extend([2 * position + long for position in positions])
    tasks.append(len(ids))
    return RowLists(ids, turns, slots, places, tasks, seen, tail_from, tails, wanted, tuple(rows_of), tuple(logits_of))


def _branching(span: Span, places: array[int], seen: array[int], tail_from: array[int], tails: array[int]) -> list[int]:
    """Lay out the rows of a tree, or of one of its levels; their positions."""
    if span.level is not None:
        own = range(span.start, span.start + len(span.tokens))
        lists = [[*above, place] for above, place in zip(span.level.ancestors, own, strict=True)]
        base, positions = span.level.base, [span.level.base + len(keys) - 1 for keys in lists]
    else:
        assert span.parents is not None
        layout = lay_out(span.parents)
        own_places = [span.start + place for place in layout.places]
        lists = []
        for row, parent in enumerate(span.parents):
            lists.append([*(lists[parent] if parent >= 0 else []), own_places[row]])
        base, positions = span.start, [span.start + depth for depth in layout.depths]
        own = own_places  # type: ignore[assignment]
    places.extend(own)
    for keys in lists:
        seen.append(base)
        tails.extend(keys)
        tail_from.append(len(tails))
    return positions
