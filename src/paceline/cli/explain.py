"""`paceline explain`: why this and not that, each number with unit, range and origin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser("explain", help="why a plan advises what it does, number by number")
    p.add_argument("plan", type=Path, metavar="PLAN")
    p.add_argument("--json", action="store_true", help="print the plan's figures as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the explanation."""
    from paceline.plan.document import read_plan
    from paceline.report.plan_text import explain_plan

    plan = read_plan(args.plan)
    print(plan.text() if args.json else explain_plan(plan))
    return 0
