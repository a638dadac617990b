"""Self-contained pages: inline style, inline SVG drawn by a little script, no request to anywhere.

A page is a template of this package with its data, style and drawing script put in. Data is embedded as JSON that
no `</script>` inside a name can end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

__all__ = ["bench_page", "page", "probe_page", "write_bench_page", "write_page_text", "write_probe_page"]

_STYLE, _CHART, _DATA = "__STYLE__", "__CHART__", "__DATA__"


def page(template: str, data: Mapping[str, Any]) -> str:
    """The template `template` with `data` in it."""
    text = _read(template)
    for mark in (_STYLE, _CHART, _DATA):
        assert text.count(mark) == 1, f"the page template {template} has one place for {mark}"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    text = text.replace(_STYLE, _read("page.css")).replace(_CHART, _read("chart.js"))
    return text.replace(_DATA, embedded)


def probe_page(summary: Mapping[str, Any]) -> str:
    """The page of a probe's summary (`plan/probe_summary.py`)."""
    return page("probe_page.html", summary)


def bench_page(summary: Mapping[str, Any]) -> str:
    """The page of a benchmark's summary (`bench/summary.py`)."""
    return page("bench_page.html", summary)


def write_probe_page(summary: Mapping[str, Any], path: Path) -> None:
    write_page_text(probe_page(summary), path)


def write_bench_page(summary: Mapping[str, Any], path: Path) -> None:
    write_page_text(bench_page(summary), path)


def write_page_text(text: str, path: Path) -> None:
    """Raises UsageError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page {path} cannot be written: {error.strerror}") from error


def _read(name: str) -> str:
    return resources.files("paceline.report").joinpath(name).read_text(encoding="utf-8")
