"""Sliding-window storage against lists of tokens: what each query sees after writes, roll-backs and steps back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.decode.cache import KVCache
from paceline.decode.model.step import KV_BLOCK, Geometry, Ring, RowPolicy, Span, build_inputs

CPU = torch.device("cpu")


class Slots:
    """Two slots of a cache of one full and one windowed layer. Every token has a name of its own, which is its key."""

    def __init__(self, ring: Ring) -> None:
        self.geometry = Geometry(1, 1, torch.float32, CPU, ring)
        self.cache = KVCache(2, 1, 2, 2, 400, torch.float32, CPU, [None, ring])
        self.texts: list[list[int]] = [[], []]
        self.next = 1.0
        for _ in self.texts:
            self.cache.allocate(400)

    def run(self, blocks: dict[int, tuple[list[int | None], list[int]]]) -> None:
        """By slot: the parents of a block, None for a chain, and the rows that are kept."""
        with self.cache.transaction() as transaction:
            spans, names = [], {}
            for slot, (parents, _) in blocks.items():
                start = transaction.reserve(slot, len(parents))
                tree = None if parents[0] is None else [-1 if p is None else p for p in parents]
                names[slot] = [int(self.next) + i for i in range(len(parents))]
                self.next += len(parents)
                spans.append(Span(slot, start, names[slot], tree))
            step = build_inputs(spans, self.cache.capacity, self.geometry, RowPolicy(kv_block=16))
            order = sorted(range(len(spans)), key=lambda i: spans[i].slot)
            rows = torch.tensor([[float(n), 0, float(n), 0] for i in order for n in names[spans[i].slot]])
            for layer in (0, 1):
                self.cache.write(layer, step.cache_slots, step.cache_positions, rows)
            self.check(step, spans, names, rows)
            for span, (slot, (_, kept)) in zip(spans, blocks.items(), strict=True):
                transaction.commit(slot, span.places(kept))
                self.texts[slot] += [names[slot][r] for r in kept]

    def check(self, step: Any, spans: list[Span], names: dict[int, list[int]], rows: torch.Tensor) -> None:
        """Plays the attention calls in order; each row of each span is found in one of them."""
        ring = self.geometry.ring
        assert ring is not None
        found = 0
        for group in step.groups:
            for layer in (0, 1) if group.placed is not None else ():
                own, slots, places = group.placed
                self.cache.write(layer, slots, places, rows[own])
            own, places = group.back or (torch.arange(len(rows)), torch.arange(len(rows)))
            for at, place in zip(own.tolist(), places.tolist(), strict=True):
                slot, query = group.slot_low + place // group.width, place % group.width
                span = next(s for s in spans if s.slot == slot)
                whole = self.texts[slot] + self.path(span, names[slot], names[slot].index(int(rows[at, 0])))
                found += 1
                for layer, mask in enumerate((group.mask, group.ring_mask)):
                    keys, _ = self.cache.keys_values(layer, slot, slot + 1, group.kv_len)
                    seen = mask[slot - group.slot_low, 0, query] == 0
                    assert len(seen) == keys.shape[2]
                    expected = whole[-ring.window :] if layer else whole
                    assert sorted(keys[0, 0, seen, 0].tolist()) == sorted(map(float, expected))
        assert found == len(rows), "a row looked at keys in no call, or in two"

    def path(self, span: Span, names: list[int], at: int) -> list[int]:
        path = []
        while at >= 0:
            path.append(names[at])
            at = at - 1 if span.parents is None else span.parents[at]
        return path[::-1]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Ring, list[Any]]:
    window = draw(st.integers(1, 12))
    ring = Ring(window, window - 1 + draw(st.integers(1, 12)))
    blocks = []
    for _ in range(draw(st.integers(1, 20))):
        width = draw(st.integers(1, ring.largest_write))
        shape = draw(st.sampled_from(["chain", "tree"]))
        parents: list[int | None] = [None] * width
        if shape == "tree":
            parents = [-1, *(draw(st.integers(0, i)) for i in range(width - 1))]
        leaf = draw(st.integers(-1, width - 1))
        path = []
        while leaf >= 0:
            path.append(leaf)
            parent = leaf - 1 if parents[leaf] is None else parents[leaf]
            leaf = -1 if parent is None else parent
        back = draw(st.one_of(st.none(), st.integers(0, 10)))
        blocks.append((draw(st.integers(0, 1)), parents, path[::-1], back))
    return ring, blocks


@given(rounds())
@settings(max_examples=120, deadline=None)
def test_queries_see_their_window_and_nothing_else(case: tuple[Ring, list[Any]]) -> None:
    """Blocks up to the largest write, chains and trees, wholly and partly kept, steps back as far as they may go."""
    ring, blocks = case
    slots = Slots(ring)
    for slot, parents, path, back in blocks:
        slots.run({slot: (parents, path), 1 - slot: ([None], [0])})
        if back is not None:
            known = slots.cache.resumable(slot, max(0, len(slots.texts[slot]) - back))
            slots.cache.truncate(slot, known)
            del slots.texts[slot][known:]


def test_a_step_back_past_the_ring_starts_over() -> None:
    slots = Slots(Ring(4, 10))
    for _ in range(5):
        slots.run({0: ([None] * 7, list(range(7)))})
    cache = slots.cache
    assert [cache.resumable(0, n) for n in (35, 28, 27, 1)] == [35, 28, 0, 0]
    with pytest.raises(AssertionError, match="cannot go back to 27"):
        cache.truncate(0, 27)
    with pytest.raises(AssertionError, match="7 at most"), cache.transaction() as transaction:
        transaction.reserve(0, 8)
    cache.truncate(0, 0)
    slots.texts[0] = []
    slots.run({0: ([None] * 3, [0])})


def test_a_ring_holds_a_window_and_a_block() -> None:
    assert Ring.holding(512) == Ring(512, 1024) and Ring.holding(4096).largest_write >= KV_BLOCK
    ring = Ring.holding(16)
    cache = KVCache(2, 1, 4, 1, 5000, torch.float32, CPU, [None, ring])
    cache.reserve_capacity(5000)
    assert [layer.rows for layer in cache.storage] == [5120, 1024]
