"""Trees in a pass: where their rows lie, that each has the bits of its path alone, and what a commit moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder
from torch import Tensor
from toy import Lab, Scripted, branching, request

from paceline.core.proposal import Proposal
from paceline.decode.cache import KVCache
from paceline.decode.draft.base import Drafter
from paceline.decode.draft.registry import make_model_free
from paceline.decode.model.branches import lay_out
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import Level, Span, build_inputs
from paceline.errors import InvalidParameter


@st.composite
def parents_of_trees(draw: st.DrawFn, most: int = 14) -> list[int]:
    size = draw(st.integers(1, most))
    near = draw(st.integers(1, most))  # near parents make deep trees
    return [-1] + [draw(st.integers(max(0, i - near), i - 1)) for i in range(1, size)]


def path_to(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@given(parents_of_trees())
def test_every_row_finds_its_path_in_place(parents: list[int]) -> None:
    """The calls played on a list of places: when a row is attended for, its ancestors lie at their depths."""
    layout = lay_out(parents)
    size = len(parents)
    assert sorted(layout.places) == list(range(size))
    assert [len(path_to(parents, row)) - 1 for row in range(size)] == list(layout.depths)
    home = [layout.places.index(place) for place in range(size)]
    lies = list(home)
    attended: list[int] = []
    calls = [(branch.path, branch.rows) for branch in layout.branches] + [(layout.replaced, layout.trunk)]
    for placed, rows in calls:
        for row in placed:
            lies[layout.depths[row]] = row
        for row in rows:
            path = path_to(parents, row)
            assert lies[: len(path)] == path
        attended += rows
    assert sorted(attended) == list(range(size)), "a row is attended for twice or never"
    assert lies == home, "something was left out of its place"


def filled(decoder: LlamaDecoder, texts: list[list[int]]) -> KVCache:
    cache = decoder.new_cache(len(texts), 200)
    for _ in texts:
        cache.allocate(200)
    with cache.transaction() as transaction:
        spans = [
            Span(slot, transaction.reserve(slot, len(text)), text, want="none", prefill=True)
            for slot, text in enumerate(texts)
        ]
        decoder.forward(build_inputs(spans, cache.capacity, decoder.geometry, decoder.row_policy), cache)
        for slot, text in enumerate(texts):
            transaction.commit(slot, range(len(text)))
    return cache


def run(decoder: LlamaDecoder, cache: KVCache, spans: list[Span]) -> list[Tensor]:
    """Logits [rows, width] of each span."""
    step = build_inputs(spans, cache.capacity, decoder.geometry, decoder.row_policy)
    logits = decoder.forward(step, cache).logits
    return [logits[first : first + count] for first, count in step.logits_of]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TEXTS = [[(7 * i * i + 3 * s) % 384 for i in range(40 + 20 * s)] for s in range(3)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])  # Gemma 3 has a layer with a window of 16
@DTYPES
@settings(max_examples=10, deadline=None)
@given(some=st.lists(st.tuples(parents_of_trees(), st.integers(0, 99)), min_size=3, max_size=3))
def test_a_row_has_the_bits_of_its_path_alone(
    kind: str, dtype: torch.dtype, some: list[tuple[list[int], int]]
) -> None:
    """Three trees (or chains of one row) in one pass; then every path as a chain, alone; then the commit of one."""
    decoder = tiny_decoder(kind, 5, dtype=dtype)
    cache = filled(decoder, TEXTS)
    tokens = [[(seed + 11 * i) % 384 for i in range(len(parents))] for parents, seed in some]
    spans = [Span(s, len(TEXTS[s]), tokens[s], some[s][0]) for s in range(3)]
    together = run(decoder, cache, spans)
    lengths = [len(text) for text in TEXTS]
    for s, (parents, _) in enumerate(some):
        alone_cache = filled(decoder, TEXTS)
        for row in range(len(parents)):
            path = path_to(parents, row)
            chain = Span(s, lengths[s], [tokens[s][at] for at in path])
            (alone,) = run(decoder, alone_cache, [chain])
            assert torch.equal(alone, together[s][path]), f"row {row} of {parents}"
        with cache.transaction() as transaction:  # the last path: keys and values as if it had been run alone
            transaction.reserve(s, len(parents))
            transaction.commit(s, spans[s].places(path))
        for kept, wanted in zip(cache.storage, alone_cache.storage, strict=True):
            end = lengths[s] + len(path)
            assert torch.equal(kept.data[:, s, :, :end], wanted.data[:, s, :, :end])


def test_keys_out_of_place_have_other_bits() -> None:
    """Why branches are attended for in place: masked where they lie, the same keys give other float32 bits.

    (The last bits of a sum over keys depend on their order; if this fails, the kernel no longer cares.)
    """
    decoder = tiny_decoder("llama", 5)
    start, tokens = len(TEXTS[0]), [9, 8, 7, 6]
    (placed,) = run(decoder, filled(decoder, TEXTS), [Span(0, start, tokens, [-1, 0, 1, 0])])
    level = Level(start, [[], [start], [start, start + 1], [start]])
    (masked,) = run(decoder, filled(decoder, TEXTS), [Span(0, start, tokens, level=level)])
    torch.testing.assert_close(placed, masked, rtol=0, atol=1e-5)
    assert torch.equal(placed[:3], masked[:3]) and not torch.equal(placed[3], masked[3])


@settings(max_examples=15, deadline=None)
@given(parents_of_trees(), st.data())
def test_a_tree_grown_by_levels(parents: list[int], data: st.DataObject) -> None:
    """Level after level, the rows of each at free places of the cache: the logits of the whole tree, to rounding."""
    decoder = tiny_decoder("llama", 5)
    start = len(TEXTS[0])
    tokens = [(5 + 17 * i) % 384 for i in range(len(parents))]
    (whole,) = run(decoder, filled(decoder, TEXTS), [Span(0, start, tokens, parents)])
    cache = filled(decoder, TEXTS)
    depths = [len(path_to(parents, row)) - 1 for row in range(len(parents))]
    places: dict[int, int] = {}
    for depth in range(max(depths) + 1):
        rows = data.draw(st.permutations([row for row in range(len(parents)) if depths[row] == depth]))
        above = [[places[at] for at in path_to(parents, row)[:-1]] for row in rows]
        first = start + len(places)
        places |= {row: first + i for i, row in enumerate(rows)}
        (logits,) = run(decoder, cache, [Span(0, first, [tokens[row] for row in rows], level=Level(start, above))])
        torch.testing.assert_close(logits, whole[list(rows)], rtol=0, atol=1e-4)


@given(st.integers(1, 9), st.data())
def test_commit_moves_rows_as_the_twin_does(rows: int, data: st.DataObject) -> None:
    """Any path in any order; what lies in place is not written at all."""
    path = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
    cache = KVCache(2, 1, 3, 2, 40, torch.float32, torch.device("cpu"))
    slot = cache.allocate(40)
    for layer in cache.storage:
        layer.data.normal_()
    with cache.transaction() as transaction:
        transaction.reserve(slot, 5)
        transaction.commit(slot, range(5))
    before = [layer.data.clone() for layer in cache.storage]
    versions = [layer.data._version for layer in cache.storage]
    with cache.transaction() as transaction:
        transaction.reserve(slot, rows)
        transaction.commit(slot, path)
    assert cache.committed(slot) == 5 + len(path)
    for layer, old in zip(cache.storage, before, strict=True):
        wanted = old.clone()
        for i, row in enumerate(path):
            wanted[:, slot, :, 5 + i] = old[:, slot, :, 5 + row]
        assert torch.equal(layer.data, wanted)
    if path == list(range(len(path))):
        assert [layer.data._version for layer in cache.storage] == versions
    cache.release(slot)
    cache.check([])


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_and_bits_are_those_of_plain_decoding(lab: Lab, dtype: torch.dtype, temperature: float) -> None:
    """Trees, chains and plain decoding side by side: tokens and log-probabilities, bit for bit."""
    decoder = tiny_decoder("llama", 5, dtype=dtype)
    asks = [
        request(
            TEXTS[i % 3][: 20 + 3 * i],
            id=str(i),
            draft=["scripted", "suffix", "none"][i % 3],
            length=None if i % 3 == 2 else 4,
            tree=9 if i % 3 == 1 else None,
            temperature=temperature,
            top_k=4 if temperature else None,
            seed=i,
            max_tokens=40,
            logprobs=2,
        )
        for i in range(6)
    ]
    plain = {r.request_id: lab.one(lab.engine(decoder), request(r.prompt, draft="none", params=r.params)) for r in asks}
    answers = {r.prompt: plain[r.request_id].tokens for r in asks}

    drafters: dict[str, Drafter] = {
        "scripted": Scripted(branching(lambda view: answers[tuple(view.tokens[: view.prompt_len])], 384)),
        "suffix": make_model_free("suffix"),
    }
    ran = lab.run(lab.engine(decoder, drafters, max_batch=5), asks, [0, 0, 1, 1, 2, 9])
    for name, (ours,) in ran.items():
        assert (ours.tokens, ours.logprobs) == (plain[name].tokens, plain[name].logprobs), name
    assert {r.tree_size for r in lab.records if r.drafter == "scripted"} >= {2, 5}
    assert all(r.confidence is None for r in lab.records if r.tree_size is not None)


def test_trees_are_kept_to_what_there_is_room_for(lab: Lab) -> None:
    """Deterministic passes hold `tile` rows; the nodes that are kept are the likeliest."""
    decoder = tiny_decoder("llama", 5)
    tile = decoder.row_policy.tile

    def wide(view: object, budget: int) -> Proposal:
        nodes = range(3 * tile)
        return Proposal(tuple(100 + i for i in nodes), (None,) * len(nodes), confidence=tuple(i / 100 for i in nodes))

    for deterministic in (False, True):
        lab.records.clear()
        engine = lab.engine(decoder, wide, deterministic=deterministic)
        lab.one(engine, request([1, 2, 3], length=2, max_tokens=5))
        drafted = [r.tree_size for r in lab.records if r.kind == "verify"]
        assert set(drafted) == {tile - 1 if deterministic else 3 * tile}


@pytest.mark.parametrize(
    ("draft", "length", "tree", "says"),
    [
        ("ngram", 4, 8, "nothing where ngram drafts"),
        ("none", 4, 8, "nothing where none drafts"),
        ("suffix", None, 8, "draft_length"),
        ("suffix", 0, 8, "draft_length"),
        ("suffix", 4, 3, "at least draft_length"),
        ("suffix", 4, 0, "a whole number from 1"),
        ("suffix", 4, True, "a whole number from 1"),
    ],
)
def test_tree_sizes_without_sense_are_refused(
    lab: Lab, draft: str, length: int | None, tree: int, says: str
) -> None:
    engine = lab.engine(
        tiny_decoder("llama", 5), {name: make_model_free(name) for name in ("ngram", "suffix")}
    )
    with pytest.raises(InvalidParameter, match=says):
        engine.add(request([1, 2], draft=draft, length=length, tree=tree))
