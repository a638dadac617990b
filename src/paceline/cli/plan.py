"""`paceline plan`: parse, call, render."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "add_plan_arguments", "request_of", "run"]

_DTYPES = ("bf16", "fp8", "fp4", "int8", "int4")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser(
        "plan", help="how far to draft, with what, and when not to, for a model on devices"
    )
    add_plan_arguments(p)
    p.add_argument("--output", type=Path, metavar="FILE", help="write the plan as JSON")
    p.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page to explore")
    p.add_argument("--json", action="store_true", help="print the plan as JSON")
    p.add_argument(
        "--list", action="store_true", help="show models, devices, mechanisms and published acceptance"
    )
    p.set_defaults(func=run)


def add_plan_arguments(p: argparse.ArgumentParser) -> None:
    """The flags that describe a scenario."""
    p.add_argument("--model", metavar="NAME|config.json|FOLDER", help="the target model")
    p.add_argument("--hardware", metavar="NAME", help="the device, such as h100 or m4-max")
    p.add_argument("--devices", type=int, metavar="N", help="devices in all (default: one replica)")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallelism")
    p.add_argument("--ep", type=int, default=1, metavar="N", help="devices the experts are spread over")
    p.add_argument("--dtype", choices=_DTYPES, default="bf16", help="number format of the target's weights")
    p.add_argument("--kv-dtype", choices=("bf16", "fp8"), help="number format of the cache")
    p.add_argument("--draft-dtype", choices=_DTYPES, default="bf16", help="number format of a drafter")
    p.add_argument("--context-tokens", type=float, default=2048, metavar="N", help="mean prompt length")
    p.add_argument("--output-tokens", type=float, default=512, metavar="N", help="mean answer length")
    p.add_argument(
        "--draft", action="append", metavar="KIND[:MODEL]", help="a way to draft; repeat to compare"
    )
    p.add_argument(
        "--acceptance",
        action="append",
        metavar="[KIND=]FILE|published:ID|0.82,0.74|AL:2.9@5|share:0.4@8",
        help="conditional acceptance by position, one for each --draft",
    )
    p.add_argument("--survival", action="append", metavar="0.82,0.61,...", help="running products instead")
    p.add_argument("--trace", type=Path, metavar="FILE", help="acceptance from a trace of Paceline's engine")
    p.add_argument(
        "--probe",
        type=Path,
        metavar="FILE",
        help="model, machine, timings, and acceptance of every --draft (default: of all it measured), from a probe",
    )
    p.add_argument(
        "--engine",
        default="any",
        metavar="NAME",
        help="vllm, sglang, trtllm, llamacpp, ... (its round costs)",
    )
    p.add_argument("--max-draft-length", type=int, default=8, metavar="N", help="longest draft looked at")
    p.add_argument(
        "--min-tokens-per-user", type=float, metavar="N", help="service level: tokens/s of each user"
    )
    p.add_argument("--max-ttft", type=float, metavar="S", help="service level: seconds to the first token")
    p.add_argument("--concurrency", type=int, metavar="N", help="requests in flight at most")


def run(args: argparse.Namespace) -> int:
    """Prints a plan; exit code 0."""
    from paceline.errors import UsageError
    from paceline.plan.planner import make_plan
    from paceline.report.plan_text import plan_text

    if args.list:
        print(_listing(args.json))
        return 0
    if args.probe is None and not (args.model and args.hardware):
        raise UsageError(
            "plan needs --model and --hardware, or --probe; `paceline plan --list` shows the known ones"
        )
    plan = make_plan(request_of(args))
    print(plan.text() if args.json else plan_text(plan), end="" if args.json else "\n")
    if args.output:
        plan.write(args.output)
        print(f"plan written to {args.output}", file=sys.stderr)
    if args.html:
        from paceline.report.plan_html import write_page

        write_page(plan, args.html)
        print(f"page written to {args.html}", file=sys.stderr)
    return 0


def request_of(args: argparse.Namespace) -> Any:
    """The request the flags describe; a probe stands in for what they leave out, and calibrates it."""
    if args.probe is None:
        return _request(args)
    from paceline.plan.probe_request import request_with_probe

    return request_with_probe(args.probe, args.model, args.hardware, lambda filled: _request(_with(args, filled)))


def _with(args: argparse.Namespace, filled: Any) -> argparse.Namespace:
    named = {**vars(args), "model": filled.model, "hardware": filled.hardware}
    if not args.draft:
        named["draft"] = list(filled.drafts)
    if not (args.acceptance or args.survival or args.trace):
        named["acceptance"] = [filled.acceptance(draft) for draft in named["draft"] if draft != "none"]
    named["draft"] = [filled.mechanism(draft) for draft in named["draft"]]
    return argparse.Namespace(**named)


def _request(args: argparse.Namespace) -> Any:
    from paceline.plan.planner import PlanRequest

    return PlanRequest(
        model=args.model,
        hardware=args.hardware,
        devices=args.devices or max(args.tp, args.ep),
        tensor=args.tp,
        expert=args.ep,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        context_tokens=args.context_tokens,
        output_tokens=args.output_tokens,
        drafts=pair_drafts(args),
        survival=bool(args.survival),
        longest=args.max_draft_length,
        min_tokens_per_user=args.min_tokens_per_user,
        max_ttft=args.max_ttft,
        concurrency=args.concurrency,
        draft_dtype=args.draft_dtype,
        engine=args.engine,
    )


def pair_drafts(args: argparse.Namespace) -> tuple[tuple[str, str | None], ...]:
    """Each --draft with its acceptance: by KIND=, else in order when there are as many of both."""
    from paceline.errors import InvalidParameter

    drafts: list[str] = args.draft or []
    given: list[str] = args.survival or args.acceptance or []
    if args.survival and args.acceptance:
        raise InvalidParameter(
            "survival", args.survival, "given without --acceptance: one kind of rate at a time"
        )
    if args.trace:
        given = [*given, str(args.trace)]
    active = [d for d in drafts if d != "none"]
    named = dict(
        g.split("=", 1) for g in given if "=" in g and g.split("=", 1)[0] in {*active, *_heads(active)}
    )
    plain = [g for g in given if g not in {f"{k}={v}" for k, v in named.items()}]
    waiting = [d for d in active if d not in named and d.partition(":")[0] not in named]
    if plain and len(plain) != len(waiting):
        raise InvalidParameter(
            "acceptance",
            ", ".join(plain),
            f"one for each --draft without its own ({', '.join(waiting) or 'none'})",
            "Write KIND=ACCEPTANCE to say whose it is.",
        )
    order = iter(plain)
    return tuple((d, named.get(d) or named.get(d.partition(":")[0]) or next(order, None)) for d in active)


def _heads(drafts: list[str]) -> set[str]:
    return {d.partition(":")[0] for d in drafts}


def _listing(as_json: bool) -> str:
    from paceline.plan.config import list_models
    from paceline.plan.hardware import list_hardware
    from paceline.plan.importers import list_published
    from paceline.plan.mechanisms import KINDS
    from paceline.report.plan_text import table

    models = [
        (m.name, f"{m.parameters / 1e9:.1f}", f"{m.active_parameters / 1e9:.1f}") for m in list_models()
    ]
    devices = [
        (
            d.name,
            d.title,
            *(f"{v:.0f}" for v in (d.flops_per_s["bf16"] / 1e12, d.bandwidth_bytes_per_s / 1e9)),
            f"{d.memory_bytes / 1e9:.0f}",
        )
        for d in list_hardware()
    ]
    curves = [(f"published:{c['name']}", c["kind"], c["data"]) for c in list_published()]
    heads = {
        "models": ("model", "B", "active B"),
        "devices": ("device", "title", "bf16 TFLOP/s", "GB/s", "GB"),
        "published": ("published acceptance", "kind", "data"),
    }
    tables: dict[str, Sequence[tuple[str, ...]]] = {"models": models, "devices": devices, "published": curves}
    if as_json:
        named = {k: [dict(zip(heads[k], row, strict=True)) for row in rows] for k, rows in tables.items()}
        return json.dumps({**named, "mechanisms": list(KINDS)}, indent=1)
    parts = [table(heads[k], rows) for k, rows in tables.items()]
    return "\n\n".join([*parts, "mechanisms: " + ", ".join(KINDS)])
