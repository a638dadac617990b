"""Whether the text depends on how it was decoded: which settings are compared, and what came of it. Pure.

The base is plain decoding. Under greedy and under seeded sampling every other setting (drafter, draft length,
batch) must give its very tokens. In float32 that is asked of every setting. In bfloat16 it is asked where a
pass has at most 32 rows (one sequence at a time), and of every setting in deterministic mode.

Transformers computes in another order, so its greedy texts may part from the base's in float32 too, at a
place where the two tokens are all but tied: where its logits put ours less than `TIE` below its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.paired import first_difference
from paceline.bench.speed_report import markdown

__all__ = [
    "PLAIN",
    "TIE",
    "TRANSFORMERS",
    "Cell",
    "Summary",
    "base_of",
    "compare_references",
    "compare_with_base",
    "equality_cells",
    "summarise",
]

PLAIN, TRANSFORMERS = "plain", "transformers"
TIE = 1e-3  # in logits
_LENGTH = 7
_LENGTHS_ON_FEW = (1, 3, 15)
_MOST_ROWS = 32
_BATCH = 8


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One setting. `few`: on every fourth prompt only. `draft_length` is None where nothing drafts."""

    temperature: float
    arm: str
    draft_length: int | None
    batch: int
    few: bool = False

    def row(self) -> dict[str, Any]:
        """What identifies the setting in a results file."""
        return {
            "temperature": self.temperature,
            "arm": self.arm,
            "draft_length": self.draft_length,
            "batch": self.batch,
        }

    def owns(self, row: Mapping[str, Any]) -> bool:
        return all(row[name] == value for name, value in self.row().items())


def equality_cells(
    drafters: Sequence[str], temperatures: Sequence[float], *, any_rows: bool, transformers: bool
) -> list[Cell]:
    """Every setting to compare, the base of each temperature first.

    any_rows       passes of any number of rows must agree; else batches are as large as `_MOST_ROWS` rows allow
    transformers   greedy texts are held against Transformers' too
    """

    def batch(length: int) -> int:
        return _BATCH if any_rows else max(1, min(_BATCH, _MOST_ROWS // (1 + length)))

    cells: list[Cell] = []
    for temperature in temperatures:
        cells.append(Cell(temperature, PLAIN, None, _BATCH))
        if transformers and temperature == 0.0:
            cells.append(Cell(temperature, TRANSFORMERS, None, 1))
        cells += [Cell(temperature, name, _LENGTH, batch(_LENGTH)) for name in drafters]
        cells.append(Cell(temperature, PLAIN, None, 1, few=True))
        cells += [Cell(temperature, name, _LENGTH, 1, few=True) for name in drafters]
        lengths = _LENGTHS_ON_FEW if any_rows else (*_LENGTHS_ON_FEW, _MOST_ROWS - 1)
        cells += [Cell(temperature, name, d, batch(d), few=True) for d in lengths for name in drafters]
    return cells


def base_of(cell: Cell, cells: Iterable[Cell]) -> Cell:
    """The plain setting `cell` is held against: the first of its temperature."""
    return next(c for c in cells if c.temperature == cell.temperature and c.arm == PLAIN)


def compare_with_base(token_ids: Sequence[int], base: Sequence[int]) -> dict[str, Any]:
    """The fields of a result: hash and count of the tokens, where they part from the base's, and only where
    they do the tokens themselves."""
    index = first_difference(token_ids, base)
    fields: dict[str, Any] = {
        "tokens": len(token_ids),
        "hash": hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16],
        "first_difference": index,
    }
    return fields if index is None else fields | {"token_ids": list(token_ids)}


def compare_references(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """`rows` with Transformers' texts, which are kept whole, held against the base's where that is known.

    Such a row has `token_ids` and `top`: before each token, the highest logits as (ids, values). It gains
    `tokens`, `first_difference` and `gap`: how far the base's token there lies below the highest logit; None
    where it is not among those kept, or where one text just ends.
    """
    compared = []
    for row in rows:
        cell = next((c for c in cells if c.arm == TRANSFORMERS and c.owns(row)), None)
        if cell is None:
            compared.append(dict(row))
            continue
        base = base_of(cell, cells)
        texts = [r["token_ids"] for r in rows if base.owns(r) and r["prompt"] == row["prompt"]]
        if texts:
            compared.append({**row, **_against(row, texts[0])})
    return compared


def _against(row: Mapping[str, Any], base: Sequence[int]) -> dict[str, Any]:
    index = first_difference(row["token_ids"], base)
    fields: dict[str, Any] = {"tokens": len(row["token_ids"]), "first_difference": index, "gap": None}
    if index is None or index >= min(len(base), len(row["top"])):
        return fields
    ids, logits = row["top"][index]
    if base[index] in ids:
        fields["gap"] = logits[0] - logits[ids.index(base[index])]
    return fields


# -- what came of it ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """`table` and `partings` are Markdown; `failures` counts texts that differ and may not."""

    table: str
    partings: list[str]
    failures: int


def summarise(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> Summary:
    """Counts by setting, and every parting with its place and, where known, its gap.

    A setting that drafted nothing has shown nothing, so drafts and accepted drafts stand beside the texts.
    """
    lines: list[list[str]] = []
    listed: list[str] = []
    failures = 0
    for cell in cells:
        own = [row for row in rows if cell.owns(row)]
        if not own:
            continue
        parted = [row for row in own if row.get("first_difference") is not None]
        excused = [row for row in parted if cell.arm == TRANSFORMERS and is_tie(row)]
        failures += len(parted) - len(excused)
        differing = str(len(parted))
        if cell.arm == TRANSFORMERS:
            differing = f"{len(parted)}, {len(excused)} of them at a tie"
        is_base = cell == base_of(cell, cells)
        counts = [str(len(own)), *(_sum(own, name) for name in ("tokens", "drafted", "accepted"))]
        lines.append([*_names(cell), *counts, "the base" if is_base else differing])
        listed += [_parting(cell, row) for row in parted]
    head = ["temperature", "arm", "D", "batch", "texts", "tokens", "drafted", "accepted", "texts that differ"]
    return Summary(markdown(head, lines), listed, failures)


def is_tie(row: Mapping[str, Any]) -> bool:
    """Whether the text parts where the two tokens are all but tied; an unknown gap is wide."""
    gap = row.get("gap")
    return gap is not None and gap < TIE


def _names(cell: Cell) -> list[str]:
    length = "" if cell.draft_length is None else str(cell.draft_length)
    return [f"{cell.temperature:g}", cell.arm, length, str(cell.batch)]


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    return str(sum(row.get(name, 0) for row in rows))


def _parting(cell: Cell, row: Mapping[str, Any]) -> str:
    length = "" if cell.draft_length is None else f" D={cell.draft_length}"
    gap = row.get("gap")
    wide = "gap unknown" if gap is None else f"gap {gap:.2g}"
    place = f"at token {row['first_difference']}, {wide}"
    return f"T={cell.temperature:g} {cell.arm}{length} batch {cell.batch}, {row['prompt']}: {place}"
