"""`--draft KIND[:MODEL]`, and proposals cut short."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.proposal import Dense, Proposal, Sparse
from paceline.decode.draft.cut import cut
from paceline.decode.draft.ngram import NgramDrafter
from paceline.decode.draft.registry import KINDS, MODEL_FREE, DraftSpec, make_auto, make_model_free, parse_draft
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.control.records import MATCHERS


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("ngram", DraftSpec("ngram")),
        ("suffix", DraftSpec("suffix")),
        ("none", DraftSpec("none")),
        ("auto", DraftSpec("auto")),
        ("layer-skip", DraftSpec("layer-skip")),
        ("layer-skip:6", DraftSpec("layer-skip", layers=6)),
        ("model:some/dir", DraftSpec("model", "some/dir")),
        ("model:plain", DraftSpec("model", "plain")),
        ("owner/name", DraftSpec("model", "owner/name")),
        ("./draft.gguf", DraftSpec("model", "./draft.gguf")),
        ("C:\\models\\draft", DraftSpec("model", "C:\\models\\draft")),
    ],
)
def test_parses(text: str, spec: DraftSpec) -> None:
    assert parse_draft(text) == spec
    assert parse_draft(str(spec)) == spec


def test_an_unknown_kind_names_its_neighbours() -> None:
    with pytest.raises(InvalidParameter, match=r"'n-gram'.*ngram, suffix, layer-skip, model.*Did you mean 'ngram'"):
        parse_draft("n-gram")
    with pytest.raises(InvalidParameter, match="model:PATH"):
        parse_draft("qqq")


@pytest.mark.parametrize(
    "text", ["", "model", "model:", "ngram:path", "none:x", "layer-skip:", "layer-skip:0", "layer-skip:x"]
)
def test_refuses_what_is_half_said(text: str) -> None:
    with pytest.raises(InvalidParameter, match="draft is"):
        parse_draft(text)


@pytest.mark.parametrize("text", ["eagle3", "mtp:x/y", "dflash", "dspark"])
def test_kinds_of_the_planner_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=text.split(":")[0]):
        parse_draft(text)


def test_makes_what_it_names() -> None:
    assert isinstance(make_model_free("ngram"), NgramDrafter)
    assert make_model_free("suffix").name == "suffix"
    assert set(MATCHERS) == set(MODEL_FREE), "the planning wing knows them by name"
    auto = make_auto()
    assert auto.name == "auto" and [drafter.name for drafter in auto.drafters] == ["suffix"]
    assert {"none", "auto", "ngram", "suffix", "layer-skip", "model"} == set(KINDS)
    with pytest.raises(InvalidParameter, match="ngram, suffix"):
        make_model_free("model")


def test_cut_keeps_the_shallow_part_and_its_rows() -> None:
    probs = np.arange(8.0).reshape(4, 2)
    tree = Proposal((1, 2, 3, 4), (None, 0, None, 2), Dense(probs), "x", (0.1, 0.2, 0.3, 0.4))
    short = cut(tree, 1)
    assert (short.tokens, short.parents, short.confidence) == ((1, 3), (None, None), (0.1, 0.3))
    assert isinstance(short.distribution, Dense)
    assert (short.distribution.probs == probs[[0, 2]]).all()
    sparse = Proposal.chain([5, 6, 7], "x", Sparse(probs[:3].astype(int), probs[:3]))
    assert cut(sparse, 2).distribution.ids.shape == (2, 2)
    assert cut(tree, 2) is tree
    assert cut(tree, 0) == Proposal()
