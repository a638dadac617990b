"""Validated figures as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.validate.figures import Figure
from paceline.report.plan_text import table

__all__ = ["validation_text"]


def validation_text(figures: Sequence[Figure]) -> str:
    """One row a figure: what was reached, what was wanted, and whether."""
    rows = []
    for f in figures:
        sign = "<=" if f.at_most else ">="
        wanted = "" if f.wanted is None else f"{sign} {f.wanted:.3f}"
        met = {True: "met", False: "MISSED", None: ""}[f.met]
        rows.append((f.group, f.what, f"{f.value:.3f}", wanted, met, f.rows or ""))
    notes = [f"{f.group}, {f.what}: {f.note}" for f in figures if f.note]
    return table(("group", "figure", "reached", "wanted", "", "rows"), rows) + "\n" + "\n".join(notes)
