"""`paceline calibrate`: fits the cost model to a few timings and says what it is now sure of."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    from paceline.cli.plan import add_plan_arguments

    p = subparsers.add_parser("calibrate", help="fit the cost model to as few as six timings")
    p.add_argument("target", metavar="PLAN|MODEL", help="a plan, or a model with --hardware and the rest")
    p.add_argument(
        "--timings",
        action="append",
        metavar="FILE[@D]",
        default=None,
        help="vllm bench serve or SGLang JSON, llama-batched-bench, or CSV; repeat for more",
    )
    add_plan_arguments(p)
    p.add_argument("--suggest", action="store_true", help="name the measurement that helps most next")
    p.add_argument("--output", type=Path, metavar="FILE", help="write the calibrated plan")
    p.add_argument("--json", action="store_true", help="print the calibration as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints what the timings tell; exit code 0."""
    from paceline.errors import UsageError
    from paceline.plan.calibrated import calibrate_request, suggest_first, suggest_next
    from paceline.plan.planner import make_plan
    from paceline.plan.timing_files import read_timings
    from paceline.report.calibration_text import calibration_text

    request = _request(args)
    if not args.timings:
        if not args.suggest:
            raise UsageError("calibrate needs --timings FILE, or --suggest to say what to measure")
        print(_design(suggest_first(request)))
        return 0
    timings = [t for text in args.timings for t in read_timings(text)]
    made = calibrate_request(request, timings)
    print(json.dumps(made.calibration.as_json(), indent=1) if args.json else calibration_text(made))
    if args.suggest:
        s = suggest_next(request, made)
        print(
            f"measure next: batch {s.batch}, D = {s.draft_length} (takes away {s.gain:.2%} expected regret)"
        )
    if args.output:
        make_plan(dataclasses.replace(request, calibration=made.calibration.as_json())).write(args.output)
        print(f"calibrated plan written to {args.output}", file=sys.stderr)
    return 0


def _request(args: argparse.Namespace) -> Any:
    from paceline.cli.plan import request_of
    from paceline.errors import UsageError
    from paceline.plan.document import read_plan
    from paceline.plan.planner import PlanRequest

    path = Path(args.target)
    if path.is_file() and path.suffix == ".json" and path.name != "config.json":
        return PlanRequest.of(read_plan(path)["request"])
    if not args.hardware:
        raise UsageError(f"{args.target} is no plan, so it is taken as a model: give --hardware too")
    args.model = args.target
    return request_of(args)


def _design(points: list[tuple[int, int]]) -> str:
    lines = [f"  batch {b}, D = {d}" for b, d in points]
    return "measure these six, with prompts of your own:\n" + "\n".join(lines)
