"""`paceline probe`: times this machine and replays prompts, and says what to run."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from paceline.cli.options import (
    add_model_options,
    end_progress,
    numbers,
    progress_bar,
    require_engine,
    say,
    show_progress,
)
from paceline.errors import InvalidParameter

__all__ = ["add_parser", "run"]

_BASE_S, _S_PER_GB = 36.0, 40.0
_MOST_TEXTS = 48  # of a kind


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser(
        "probe",
        help="time this machine and replay prompts: what to draft with, how far, and what it gains",
        description="Time the target's passes and every drafter, replay the drafters over answers to prompts, and "
        "say what to run. The file is read by `plan --probe` and `replay`.",
        allow_abbrev=False,
    )
    add_model_options(p)
    p.add_argument(
        "--prompts",
        action="append",
        metavar="NAME|FILE",
        help="workloads or files: JSON lines with `prompt`, or one a line; repeatable or by commas (default: sample)",
    )
    p.add_argument("--temperature", default="0", metavar="T[,T]", help="answers at each of these (default: 0)")
    p.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default: %(default)s)")
    p.add_argument("--budget", type=float, metavar="SECONDS", help="in all (default: 36, and 40 a GB of weights)")
    p.add_argument("--against", type=Path, metavar="FILE", help="an earlier probe: what its plan loses under this one")
    p.add_argument("--output", type=Path, metavar="FILE", help="write what was measured")
    p.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    p.add_argument("--json", action="store_true", help="print the summary as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the summary; exit code 0."""
    from paceline.plan.probe_file import read_probe
    from paceline.plan.probe_summary import compare_probes, summarise_probe
    from paceline.report.probe_text import probe_text

    earlier = None if args.against is None else read_probe(args.against)
    probe = _measure(args)
    if args.output:
        probe.write(args.output)
        say(f"probe written to {args.output}")
    summary = summarise_probe(probe)
    if earlier is not None:
        summary["against"] = compare_probes(earlier, probe)
    print(json.dumps(summary) if args.json else probe_text(summary))
    if args.html:
        from paceline.report.pages import write_probe_page

        write_probe_page(summary, args.html)
        say(f"page written to {args.html}")
    return 0


def _measure(args: argparse.Namespace) -> Any:
    from paceline.bench.workloads import open_workloads

    began = time.perf_counter()
    temperatures = tuple(numbers("--temperature", args.temperature))
    if args.budget is not None and not args.budget > 0:
        raise InvalidParameter("--budget", args.budget, "a positive number of seconds")
    names = [name for text in args.prompts or ["sample"] for name in text.split(",")]
    workloads = open_workloads(names, _MOST_TEXTS)
    require_engine()
    from paceline.bench.probe import ProbeOptions, run_probe
    from paceline.decode.llm import LLM

    llm = LLM(
        args.model,
        draft=args.draft or "auto",
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        device=args.device,
        threads=args.threads,
        max_context=args.max_context,
        prefix_cache=False,
        progress=show_progress,
    )
    budget = args.budget or _BASE_S + _S_PER_GB * _gigabytes(llm)
    end_progress()
    say(f"{args.model}: {llm.precision}, about {budget:.0f} s")
    options = ProbeOptions(
        budget_s=budget,
        temperatures=temperatures,
        max_tokens=args.max_tokens,
        began=began,
    )
    probe = run_probe(llm, workloads, options, progress_bar)
    end_progress()
    return probe


def _gigabytes(llm: Any) -> float:
    """Weights of the target and of every draft model."""
    models = [getattr(drafter, "model", None) for drafter in llm.draft_set.drafters.values()]
    return float(sum(m.weight_bytes for m in [llm.engine.model, *models] if m is not None) / 1e9)
