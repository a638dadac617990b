"""Names in, table rows out; an unknown name is an error that offers the nearest ones."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any

from paceline.errors import InvalidParameter

__all__ = ["nearest", "normalise", "read_table", "unknown_name"]


def read_table(name: str) -> dict[str, Any]:
    """The JSON table `name` that travels with the package."""
    text = resources.files("paceline.plan").joinpath("data", name).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def normalise(name: str) -> str:
    """Lower case, with runs of blanks, slashes and underscores as single hyphens."""
    return re.sub(r"[\s_/]+", "-", name.strip().lower())


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` known names most like `name`, best first."""
    table = {normalise(k): k for k in known}
    key = normalise(name)
    found = difflib.get_close_matches(key, table, n=count, cutoff=0.4)
    found += [k for k in table if key and (key in k or k in key) and k not in found]
    return [table[k] for k in found[:count]]


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> InvalidParameter:
    """The error for a name that no table knows."""
    close = nearest(name, known)
    allowed = ("nearest known: " + ", ".join(close)) if close else "a name that `paceline plan --list` shows"
    return InvalidParameter(kind, name, allowed, hint)
