"""The indexed matchers against their twins that search every position."""

from __future__ import annotations

import pytest
from drafter_twins import ngram_continuation, suffix_chain, suffix_places, suffix_tree
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.corpus import Corpus
from paceline.decode.draft.ngram import NgramDrafter
from paceline.decode.draft.suffix import SuffixDrafter, SuffixOptions

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def grown(drafter: NgramDrafter | SuffixDrafter, tokens: list[int], split: int) -> SequenceView:
    """A view that began with `split` tokens and observed the others in two steps."""
    view = SequenceView(0, tokens[:split], split, SamplingParams())
    drafter.begin(view)
    for end in ((split + len(tokens)) // 2, len(tokens)):
        view.tokens.extend(tokens[len(view.tokens) : end])
        drafter.observe([view], [None])
    return view


@given(texts, st.integers(0, 40), st.integers(1, 12), st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.4]))
def test_ngram(tokens: list[int], split: int, budget: int, min_ngram: int, min_prob: float) -> None:
    drafter = NgramDrafter(min_ngram, min_ngram + 2, min_prob)
    view = grown(drafter, tokens, min(split, len(tokens)))
    (proposal,) = drafter.propose([view], [budget])
    wanted = ngram_continuation(tokens, budget, min_ngram, min_ngram + 2, min_prob)
    assert list(proposal.tokens) == wanted


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(0, 2))
def test_corpus_finds_every_place(documents: list[list[int]], tokens: list[int], removed: int) -> None:
    corpus = Corpus((2, 4))
    for document in documents:
        corpus.add(document)
    for _ in range(min(removed, len(documents))):
        corpus.remove_oldest()
    found = corpus.places(tokens, len(tokens), limit=1000, max_match=6)
    wanted = {p for p in suffix_places(tokens, documents, 2, 6) if p[0] >= removed}
    assert {(p.document.number, p.start, p.match) for p in found} == wanted
    assert len(found) == len(wanted), "a place was returned twice"
    assert corpus.num_tokens == sum(map(len, documents[removed:]))


@given(st.lists(texts, max_size=3), texts, st.integers(0, 40), st.integers(1, 8))
def test_suffix(pool: list[list[int]], tokens: list[int], split: int, budget: int) -> None:
    """The chain, and the tree by the chances on its paths: equally likely nodes may stand for one another."""
    options = SuffixOptions(min_match=2, max_match=8, max_places=1000)
    drafter = SuffixDrafter(options)
    for key, output in enumerate(pool, start=1):
        view = SequenceView(key, list(output), 0, SamplingParams())
        drafter.begin(view)
        drafter.end(view)
    kept = [output for output in pool if len(output) > options.min_match]
    view = grown(drafter, tokens, min(split, len(tokens)))
    (proposal,) = drafter.propose([view], [budget])
    assert list(proposal.tokens) == suffix_chain(tokens, kept, budget, options)
    view.tree_size = budget + 5
    (proposal,) = drafter.propose([view], [budget])
    wanted = suffix_tree(tokens, kept, budget, options)
    assert proposal.confidence is not None or not wanted
    survival: list[float] = []
    for node, parent in enumerate(proposal.parents):
        path = tuple(proposal.tokens[at] for at in proposal.path_to(node))
        assert proposal.confidence is not None
        survival.append(proposal.confidence[node] * (1.0 if parent is None else survival[parent]))
        assert survival[-1] == pytest.approx(wanted[path])
    best = sorted(wanted.values(), reverse=True)[: budget + 5]
    assert survival == pytest.approx(best)
