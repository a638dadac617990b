"""`paceline export`: a plan in an engine's words."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser("export", help="a plan as the launch command and files of an engine")
    p.add_argument("plan", type=Path, metavar="PLAN")
    p.add_argument(
        "--to", required=True, metavar="ENGINE", help="vllm, sglang, trtllm, llamacpp, transformers, openvino"
    )
    p.add_argument("--engine-version", metavar="V", help="warn of that version's traps")
    p.add_argument(
        "--output", type=Path, metavar="DIR", help="write the files there instead of printing them"
    )
    p.add_argument("--json", action="store_true", help="print files and warnings as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints or writes the files; warnings go to stderr. Exit code 3 where the engine lacks the mechanism."""
    from paceline.errors import UsageError
    from paceline.plan.document import read_plan
    from paceline.plan.export import render

    made = render(read_plan(args.plan), args.to, args.engine_version)
    if args.json:
        print(json.dumps({"files": dict(made.files), "warnings": list(made.warnings)}, indent=1))
        return 0
    if args.output:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
            for name, text in made.files.items():
                (args.output / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{args.output} cannot be written: {error.strerror}") from error
        print(f"wrote {', '.join(made.files)} to {args.output}", file=sys.stderr)
    else:
        for name, text in made.files.items():
            print(f"# {name}\n{text}")
    for warning in made.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return 0
