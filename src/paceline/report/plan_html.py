"""A plan as one self-contained page: inline SVG, a little script, no request to anywhere."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from paceline.errors import UsageError
from paceline.plan.document import Plan

__all__ = ["plan_page", "write_page"]

_MARK = "__PLAN__"


def plan_page(plan: Plan) -> str:
    """The page's text. The plan is embedded as JSON that no `</script>` inside a name can end."""
    template = resources.files("paceline.report").joinpath("plan_page.html").read_text(encoding="utf-8")
    assert template.count(_MARK) == 1, "the page template has one place for the plan"
    data = json.dumps(plan.data, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return template.replace(_MARK, data)


def write_page(plan: Plan, path: Path) -> None:
    try:
        path.write_text(plan_page(plan), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page {path} cannot be written: {error.strerror}") from error
