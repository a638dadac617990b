"""`paceline doctor`: does this draft fit this target on this machine, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from paceline.cli.options import require_engine

if TYPE_CHECKING:
    from paceline.decode.model.checkpoint import CheckpointInfo
    from paceline.decode.model.doctor import PairReport

__all__ = ["add_parser", "run"]

_PRECISIONS = ("auto", "bfloat16", "float32", "int4", "int8")  # auto and PRECISIONS, without loading torch


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check a target and its draft before loading them",
        description=(
            "Compare the vocabularies, contexts and memory of a target and its draft. Reads configs and "
            "tokenizers only. Exit code 3 where the pair cannot work."
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="the target: a name, a .gguf file, a folder or an id")
    parser.add_argument("--draft", metavar="KIND[:MODEL]", default="none", help="the draft (default: %(default)s)")
    parser.add_argument("--draft-length", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default: 1)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens each (default: the target's, up to 8192)")
    parser.add_argument("--dtype", choices=_PRECISIONS, default="auto", help="default: %(default)s")
    parser.add_argument("--draft-dtype", choices=_PRECISIONS, help="default: as --dtype")
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N] (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    require_engine()
    import torch

    from paceline.decode.draft.registry import parse_draft
    from paceline.decode.loading import why_not_compiled
    from paceline.decode.model.checkpoint import inspect_checkpoint
    from paceline.decode.model.doctor import Level, Load, available_memory_bytes, examine_pair
    from paceline.decode.model.precision import pick_precision

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    available = available_memory_bytes(args.device)
    device = torch.device(args.device)
    target = inspect_checkpoint(args.model, say)
    spec = parse_draft(args.draft)
    draft = None if spec.model is None else inspect_checkpoint(spec.model, say)
    load = Load(
        batch=args.batch,
        context_tokens=min(target.max_positions, 8192) if args.context is None else args.context,
        draft_length=args.draft_length,
        target_precision=pick_precision(args.dtype, device),
        draft_precision=pick_precision(args.draft_dtype or args.dtype, device),
    )

    def missing(model: CheckpointInfo, precision: str) -> str:
        return "" if precision == "float32" else why_not_compiled(model.config, device, say)

    uncompiled = (
        missing(target, load.target_precision),
        None if draft is None else missing(draft, load.draft_precision),
    )
    report = examine_pair(target, draft, load, available, spec.layers, uncompiled, device.type == "cpu")
    print(json.dumps(report.to_dict(), indent=2) if args.json else render(report))
    return 3 if report.worst is Level.ERROR else 0


def render(report: PairReport) -> str:
    """The report as lines: level, topic, what was found, what to do."""
    lines = [f"target  {report.target}", f"draft   {report.draft or 'no model'}", ""]
    for finding in report.findings:
        lines.append(f"{finding.level:<5}  {finding.topic}: {finding.text}")
        if finding.advice:
            lines.append(f"       {finding.advice}")
    return "\n".join(lines)
