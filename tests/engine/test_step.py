"""Passes of any mixture: every row sees its slot's committed tokens, its own ancestors and itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyModel, hashed

from paceline.decode.model.step import Span, build_inputs

WIDTH = 13
SLOTS = 4


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int, list[int], list[int] | None, str, bool]]:
    """For some slots: slot, committed tokens, tokens of the pass, parents, want, prefill."""
    made = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)):
        tokens = draw(st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=9))
        prefill = draw(st.booleans())
        parents = None
        if not prefill and draw(st.booleans()):
            parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, len(tokens))]
        want = draw(st.sampled_from(["last", "none"])) if prefill else "all"
        made.append((slot, draw(st.integers(0, 20)), tokens, parents, want, prefill))
    return made


def prefixes(committed: list[int], tokens: list[int], parents: list[int] | None) -> list[tuple[int, ...]]:
    """The whole prefix of each row, by walking up to the root."""
    result = []
    for row in range(len(tokens)):
        path, at = [], row
        while at >= 0:
            path.append(tokens[at])
            at = parents[at] if parents is not None else at - 1
        result.append((*committed, *path[::-1]))
    return result


@settings(max_examples=150, deadline=None)
@given(parts=spans(), multiple=st.sampled_from([1, 2, 4, 8]), tiled=st.booleans())
def test_every_row_reads_its_own_prefix(parts: list, multiple: int, tiled: bool) -> None:
    model = ToyModel(hashed(WIDTH), WIDTH, multiple=multiple)
    cache = model.new_cache(SLOTS, 64)
    cache.reserve_capacity(64)
    built, wanted = [], []
    for slot, start, tokens, parents, want, prefill in parts:
        committed = [(7 * slot + i) % WIDTH for i in range(start)]
        rows = torch.tensor([[i, token] for i, token in enumerate(committed)], dtype=torch.float32)
        cache.write(0, torch.full((start,), slot), torch.arange(start), rows.view(-1, 2))
        built.append(Span(slot, start, tokens, parents, want, prefill))
        whole = prefixes(committed, tokens, parents)
        wanted.append({"all": whole, "last": whole[-1:], "none": []}[want])
    step = build_inputs(built, cache.capacity, model.geometry, model.row_policy, tiled)
    result = model.forward(step, cache)
    for (first, count), expected in zip(step.logits_of, wanted, strict=True):
        assert count == len(expected)
        for row, prefix in zip(result.logits[first : first + count], expected, strict=True):
            assert torch.equal(row, torch.from_numpy(model.logits(prefix)))
    covered = [row for low, high in step.pieces for row in range(low, high)]
    assert covered == list(range(len(step.token_ids))), "products leave rows out or count them twice"
    assert len(step.token_ids) % multiple == 0


def test_a_block_that_fills_its_slots_beside_a_prompt() -> None:
    """The rows of slots 0 and 1 lie as attention wants them, but the pass holds a third sequence too."""
    model = ToyModel(hashed(WIDTH), WIDTH, multiple=1)
    cache = model.new_cache(3, 64)
    cache.reserve_capacity(64)
    block, single, prompt = Span(0, 0, [1, 2, 3, 4]), Span(1, 0, [5]), Span(2, 0, [6, 7, 8], prefill=True)
    step = build_inputs([block, single, prompt], cache.capacity, model.geometry, model.row_policy)
    assert all(group.rows is not None for group in step.groups)
    logits = model.forward(step, cache).logits
    assert torch.equal(logits[-1], torch.from_numpy(model.logits((6, 7, 8))))
