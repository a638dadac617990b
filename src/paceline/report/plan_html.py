"""A plan as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from paceline.plan.document import Plan
from paceline.report.pages import page, write_page_text

__all__ = ["plan_page", "write_page"]


def plan_page(plan: Plan) -> str:
    """The page's text."""
    return page("plan_page.html", plan.data)


def write_page(plan: Plan, path: Path) -> None:
    write_page_text(plan_page(plan), path)
