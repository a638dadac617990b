"""One validated figure, and how tables of measurements are found and read."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["Figure", "inside_figures", "read_rows"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured accuracy beside the one wanted. `wanted` None: reported without a target."""

    group: str
    what: str
    value: float
    wanted: float | None
    at_most: bool = True
    rows: int = 0
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


def inside_figures(group: str, share: float, rows: int) -> list[Figure]:
    """The two bounds on how many held-out points an 80 % interval holds."""
    what = "held-out points inside the 80 % interval"
    return [
        Figure(group, f"{what}, at least", share, 0.7, False, rows),
        Figure(group, f"{what}, at most", share, 0.9, True, rows),
    ]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file as dictionaries."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"the measurements {path} cannot be read: {error.strerror}") from error
