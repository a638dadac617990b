"""`paceline validate`: prediction against published measurement, failures included."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

SETS = ("package", "dspark", "ratios", "published", "signs", "silicon", "gemm")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser("validate", help="predictions against published measurements, misses included")
    p.add_argument("--data", type=Path, metavar="DIR", help="folder of the large measurement sets")
    p.add_argument("--set", action="append", choices=SETS, dest="sets", help="only this set; repeat for more")
    p.add_argument("--json", action="store_true", help="print the figures as JSON")
    p.add_argument(
        "--write-residuals", type=Path, metavar="FILE", help="write the residuals that uncalibrated bands use"
    )
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints one line a figure; exit code 0 whatever the figures are."""
    from paceline.errors import MissingExtra, UsageError
    from paceline.plan.validate.runner import run_set
    from paceline.report.validation_text import validation_text

    if args.data is None and set(args.sets or ("package",)) != {"package"}:
        raise UsageError(
            "--set needs --data DIR with the measurements; without it the package's own table is checked"
        )
    names = args.sets or (("package",) if args.data is None else SETS)
    figures = []
    for name in names:
        print(f"validating {name} ...", file=sys.stderr)
        try:
            figures += run_set(name, args.data)
        except MissingExtra as error:
            if args.sets:
                raise
            print(f"left out {name}: {error}", file=sys.stderr)
    if args.write_residuals:
        from paceline.plan.validate.runner import write_residuals

        write_residuals(args.data, args.write_residuals)
    if args.json:
        print(json.dumps([{**dataclasses.asdict(f), "met": f.met} for f in figures], indent=1))
    else:
        print(validation_text(figures))
    return 0
