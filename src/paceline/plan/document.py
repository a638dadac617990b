"""The plan as a file: what was asked, what is advised, and every figure with unit, range and origin.

`Plan` is plain JSON inside (schema `paceline.plan/1`). A reader refuses a schema it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.estimate import Estimate
from paceline.errors import ModelFormatError, UsageError

__all__ = ["SCHEMA", "Plan", "as_json", "read_plan"]

SCHEMA = "paceline.plan/1"
_FIELDS = ("schema", "request", "scenario", "candidates", "schedule", "break_even", "answer", "frontier",
           "time_by_operator", "memory", "guidelines", "pictures", "warnings", "calibration")  # fmt: skip


def as_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": estimate.value, "low": estimate.low, "high": estimate.high, "unit": estimate.unit,
        "origin": str(estimate.origin), "source": estimate.source,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan. `data` has exactly the keys of the schema."""

    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.data.get("schema") != SCHEMA:
            raise ModelFormatError(f"schema is {self.data.get('schema')!r}; this version reads {SCHEMA!r}")
        missing = [k for k in _FIELDS if k not in self.data]
        unknown = sorted(set(self.data) - set(_FIELDS))
        if missing or unknown:
            raise ModelFormatError(f"a plan lacks {missing} and has unknown fields {unknown}")

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def text(self) -> str:
        return json.dumps(self.data, indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        try:
            path.write_text(self.text(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the plan {path} cannot be written: {error.strerror}") from error


def read_plan(path: Path) -> Plan:
    """A plan from its file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from error
    if not isinstance(data, dict):
        raise ModelFormatError(f"{path} is not a plan: a JSON object is needed")
    return Plan(data)
