"""`paceline whatif`: a plan made again with something changed, side by side with the old one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

# Flag -> field of the request.
CHANGES = {
    "model": "model",
    "hardware": "hardware",
    "devices": "devices",
    "tp": "tensor",
    "ep": "expert",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "context_tokens": "context_tokens",
    "output_tokens": "output_tokens",
    "concurrency": "concurrency",
    "min_tokens_per_user": "min_tokens_per_user",
    "max_ttft": "max_ttft",
    "max_draft_length": "longest",
    "engine": "engine",
}
_WHOLE = ("devices", "tp", "ep", "concurrency", "max_draft_length")
_REAL = ("context_tokens", "output_tokens", "min_tokens_per_user", "max_ttft")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser("whatif", help="a plan beside the same plan with something changed")
    p.add_argument("plan", type=Path, metavar="PLAN")
    for flag in CHANGES:
        kind = int if flag in _WHOLE else float if flag in _REAL else str
        p.add_argument(f"--{flag.replace('_', '-')}", type=kind, default=None)
    p.add_argument(
        "--draft", action="append", metavar="KIND[:MODEL]", help="other drafters, with their --acceptance"
    )
    p.add_argument("--acceptance", action="append", help="other acceptance, one for each drafter")
    p.add_argument("--output", type=Path, metavar="FILE", help="write the new plan")
    p.add_argument("--json", action="store_true", help="print both answers as JSON")
    p.set_defaults(func=run, survival=None, trace=None)


def run(args: argparse.Namespace) -> int:
    """Prints two plans side by side."""
    from paceline.plan.document import read_plan
    from paceline.plan.planner import PlanRequest, make_plan
    from paceline.report.plan_text import compare_plans

    old = read_plan(args.plan)
    request = _changed(args, PlanRequest.of(old["request"]))
    new = make_plan(request)
    if args.output:
        new.write(args.output)
    print(
        json.dumps({"plan": old["answer"], "whatif": new["answer"]}, indent=1)
        if args.json
        else compare_plans(old, new)
    )
    return 0


def _changed(args: argparse.Namespace, request: Any) -> Any:
    from paceline.cli.plan import pair_drafts

    changes = {
        field: getattr(args, flag) for flag, field in CHANGES.items() if getattr(args, flag) is not None
    }
    if args.draft or args.acceptance:
        args.draft = args.draft or [d for d, _ in request.drafts]
        changes |= {"drafts": pair_drafts(args), "survival": False}
    made = dataclasses.replace(request, **changes)
    replica = max(made.tensor, made.expert)
    if args.devices is None and made.devices % replica:
        made = dataclasses.replace(made, devices=replica)
    # A calibration belongs to the machine, the model and the engine it was measured on.
    if changes.keys() & {"model", "hardware", "dtype", "tensor", "expert", "engine"}:
        made = dataclasses.replace(made, calibration=None)
    return made
