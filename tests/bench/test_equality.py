"""The equality table: every promised setting is in it, and no difference is overlooked or excused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.equality import (
    PLAIN,
    TIE,
    TRANSFORMERS,
    Cell,
    base_of,
    compare_references,
    compare_with_base,
    equality_cells,
    summarise,
)

DRAFTERS = ("ngram", "model")
BASE, DRAFTED = Cell(0.0, PLAIN, None, 8), Cell(0.0, "ngram", 7, 8)
REFERENCE = Cell(0.0, TRANSFORMERS, None, 1)
CELLS = [BASE, REFERENCE, DRAFTED]


def row(cell: Cell, prompt: str, tokens: list[int], base: list[int]) -> dict[str, Any]:
    kept = {"token_ids": tokens} if cell == BASE else {}
    return cell.row() | {"prompt": prompt} | compare_with_base(tokens, base) | kept


def reference_row(tokens: list[int], top: list[Any]) -> dict[str, Any]:
    return REFERENCE.row() | {"prompt": "p", "token_ids": tokens, "top": top}


def test_settings_of_float32() -> None:
    cells = equality_cells(DRAFTERS, [0.0, 0.8], any_rows=True, transformers=True)
    assert len(set(cells)) == len(cells)
    for temperature in (0.0, 0.8):
        own = [c for c in cells if c.temperature == temperature]
        assert own[0] == Cell(temperature, PLAIN, None, 8) == base_of(own[-1], cells)
        for name in DRAFTERS:
            assert {(c.draft_length, c.batch, c.few) for c in own if c.arm == name} == {
                (7, 8, False),
                (7, 1, True),
                (1, 8, True),
                (3, 8, True),
                (15, 8, True),
            }
        assert Cell(temperature, PLAIN, None, 1, few=True) in own
    assert [c.temperature for c in cells if c.arm == TRANSFORMERS] == [0.0]


def test_settings_of_few_rows_never_exceed_32() -> None:
    cells = equality_cells(DRAFTERS, [0.0], any_rows=False, transformers=False)
    assert {c.batch for c in cells} == {1, 2, 4, 8} and cells[0] == Cell(0.0, PLAIN, None, 8)
    assert max(c.batch * (1 + (c.draft_length or 0)) for c in cells) == 32


def test_a_difference_is_counted_and_placed() -> None:
    base = [1, 2, 3]
    rows = [row(BASE, "p", base, base), row(BASE, "q", base, base)]
    drafts = {"gap": 0.25, "drafted": 5, "accepted": 2}
    rows += [row(DRAFTED, "p", base, base), row(DRAFTED, "q", [1, 9, 3], base) | drafts]
    summary = summarise(rows, CELLS)
    assert summary.failures == 1
    assert "| 0 | plain |  | 8 | 2 | 6 | 0 | 0 | the base |" in summary.table
    assert "| 0 | ngram | 7 | 8 | 2 | 6 | 5 | 2 | 1 |" in summary.table
    assert summary.partings == ["T=0 ngram D=7 batch 8, q: at token 1, gap 0.25"]


def test_a_small_gap_does_not_excuse_our_own_texts() -> None:
    base = [1, 2]
    rows = [row(BASE, "p", base, base), row(DRAFTED, "p", [1, 9], base) | {"gap": 0.0}]
    assert summarise(rows, CELLS).failures == 1


def test_a_text_that_just_ends_differs() -> None:
    assert compare_with_base([1, 2], [1, 2, 3])["first_difference"] == 2
    assert "token_ids" not in compare_with_base([1, 2], [1, 2])
    assert compare_with_base([1, 2], [1, 2])["hash"] != compare_with_base([12], [12])["hash"]


@pytest.mark.parametrize(
    ("tokens", "top", "gap", "failures"),
    [
        ([1, 2], [[[1], [3.0]], [[2], [3.0]]], None, 0),
        ([1, 9], [[[1], [3.0]], [[9, 2], [3.0, 3.0 - TIE / 2]]], TIE / 2, 0),
        ([1, 9], [[[1], [3.0]], [[9, 2], [3.0, 2.5]]], 0.5, 1),
        ([1, 9], [[[1], [3.0]], [[9, 4], [3.0, 3.0]]], None, 1),  # ours is not even among the highest
        ([1], [[[1], [3.0]]], None, 1),  # it ended, ours went on
        ([1, 2, 3], [[[1], [3.0]], [[2], [3.0]], [[3], [3.0]]], None, 1),  # ours ended
    ],
)
def test_transformers_may_part_at_a_tie_alone(
    tokens: list[int], top: list[Any], gap: float | None, failures: int
) -> None:
    rows = compare_references([reference_row(tokens, top), row(BASE, "p", [1, 2], [1, 2])], CELLS)
    assert rows[0]["gap"] == (None if gap is None else pytest.approx(gap))
    assert summarise(rows, CELLS).failures == failures


def test_a_reference_without_its_base_is_left_out() -> None:
    assert compare_references([reference_row([1], [[[1], [3.0]]])], CELLS) == []
