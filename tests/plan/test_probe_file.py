"""A probe's file is read back equal, and what cannot be is refused by name; its table of passes keeps cliffs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_toys import machine, made_up_probe, texts

from paceline.errors import InvalidParameter, ModelFormatError
from paceline.plan.pass_table import PassTable, resampled
from paceline.plan.probe_file import Drafts, PassTime, ProbeFile, ReplayedText, read_probe


@given(st.lists(texts(), min_size=1, max_size=3))
def test_what_is_written_is_read_back(made: list[ReplayedText]) -> None:
    probe = made_up_probe(made)
    assert ProbeFile.of(json.loads(json.dumps(probe.as_json()))) == probe


def changed(**values: Any) -> dict[str, Any]:
    text = ReplayedText("chat", "1", 0.0, 5, 2, True, False, {"a": Drafts((2,), (1,), ((0.5, 0.5),))})
    return {**made_up_probe([text]).as_json(), **values}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (changed(schema="paceline.probe/0"), "paceline.probe/0"),
        (changed(colour="red"), "colour"),
        ({k: v for k, v in changed().items() if k != "passes"}, "passes"),
        (changed(passes=3), "passes"),
        (changed(passes=[{"batch": 0, "width": 1, "context": 0, "seconds": [1.0]}]), "batch"),
        (changed(passes=[{"batch": 1, "width": 1, "context": 0, "seconds": []}]), "seconds"),
        (changed(texts=[{"task": "chat"}]), "ReplayedText"),
    ],
)
def test_a_file_that_is_no_probe_is_refused(data: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ModelFormatError, match=word):
        read_probe(path)


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="matched"):
        Drafts((1,), (2,))
    with pytest.raises(InvalidParameter, match="drafts of a"):
        ReplayedText("chat", "1", 0.0, 5, 3, True, False, {"a": Drafts((1,), (1,))})


def test_measured_points_are_given_back_and_cliffs_kept() -> None:
    def seconds(batch: int, width: int, context: int) -> float:
        rows = batch * width
        return (1.0 if rows <= 8 else 2.0) + rows / 1000

    table = PassTable(machine(seconds))
    for batch in (1, 4):
        for width in (1, 2, 4, 8, 16):
            assert table.seconds(batch, width) == pytest.approx(seconds(batch, width, 256))
    assert table.free_rows() == 8
    assert table.free_rows(batch=4) == 8


def test_contexts_add_what_was_fitted_there() -> None:
    def seconds(batch: int, width: int, context: int) -> float:
        return 1.0 + 0.01 * batch * width + batch * context * (1e-5 + 1e-6 * width)

    table = PassTable(machine(seconds, contexts=(256, 1024)))
    assert table.seconds(4, 8, 2048) == pytest.approx(seconds(4, 8, 2048))
    assert table.seconds(2, 3, 512) == pytest.approx(seconds(2, 3, 512), rel=0.02)


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5), st.integers(1, 40))
def test_more_rows_are_never_cheaper(times: list[float], width: int) -> None:
    points = [PassTime(1, w, 256, (t,) * 3) for w, t in zip((1, 2, 4, 8, 16), times, strict=True)]
    table = PassTable(points)
    assert table.seconds(1, width + 1) >= table.seconds(1, width) - 1e-12
    assert resampled(points, random.Random(0)).seconds(1, width) == pytest.approx(table.seconds(1, width))
