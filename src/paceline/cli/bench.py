"""`paceline bench`: measures ways to draft against plain decoding, on the same prompts, in turns."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from paceline.bench.bench_run import BenchPlan
    from paceline.bench.results import ResultFile

__all__ = ["add_parser", "run"]

_POOLS = {"cold": ("cold",), "warm": ("kind",), "both": ("cold", "kind")}


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser(
        "bench",
        help="measure drafters and draft lengths against plain decoding, in turns, on the same prompts",
        description="Every prompt by every arm, in turns, in one process; answers end where the model ends them, and "
        "every text is held against plain decoding's. With --url, servers that speak OpenAI's API are the arms.",
        allow_abbrev=False,
    )
    add_model_options(p)
    p.add_argument(
        "--workload", action="append", metavar="NAME|FILE",
        help="chat, code, code_edit, maths, json, multilingual, spec_bench, adversarial, sample, or a file; repeatable "
        "or parted by commas (default: sample)",
    )  # fmt: skip
    p.add_argument("--prompts", type=int, default=8, metavar="N", help="of each workload (default: %(default)s)")
    p.add_argument("--concurrency", default="1", metavar="N[,N]", help="requests kept running (default: 1)")
    p.add_argument("--draft-length", default="auto,0", metavar="N|auto[,...]", help="arms (default: auto,0)")
    p.add_argument("--screen", type=int, metavar="N", help="of the fixed arms run only the N best by a replay")
    p.add_argument("--probe", type=Path, metavar="FILE", help="the replay for --screen (default: made first, 30 s)")
    p.add_argument("--transformers", action="store_true", help="one more arm: Transformers' own generate, greedy")
    p.add_argument("--temperature", default="0", metavar="T[,T]", help="default: 0")
    p.add_argument("--pool", default="cold", choices=tuple(_POOLS), help="answers to other prompts to draft from")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="repeats of everything (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of an answer (default: %(default)s)")
    p.add_argument("--url", action="append", metavar="[NAME=]URL", help="a server to measure; repeatable")
    p.add_argument("--output", type=Path, metavar="FILE", help="keep results, and go on where a run was cut off")
    p.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    p.add_argument("--json", action="store_true", help="print the summary as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the summary; exit code 1 where a text parts from plain decoding's that may not (`bench_text.broken`)."""
    from paceline.report.bench_text import bench_text, broken

    plan = _plan(args)
    summary = _servers(args, plan) if args.url else _engine(args, plan)
    end_progress()
    print(json.dumps(summary) if args.json else bench_text(summary))
    if args.html:
        from paceline.report.pages import write_bench_page

        write_bench_page(summary, args.html)
        say(f"page written to {args.html}")
    return 1 if not args.url and broken(summary) else 0


def _plan(args: argparse.Namespace) -> BenchPlan:
    for name, value in (("--prompts", args.prompts), ("--rounds", args.rounds), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise InvalidParameter(name, value, "a whole number from 1")
    if args.screen is not None and args.screen < 1:
        raise InvalidParameter("--screen", args.screen, "a whole number from 1")
    if args.probe is not None and args.screen is None:
        raise InvalidParameter("--probe", str(args.probe), "nothing unless --screen is given")
    concurrencies = [int(c) for c in numbers("--concurrency", args.concurrency, low=1, whole=True)]
    temperatures = numbers("--temperature", args.temperature)
    if args.transformers and (concurrencies != [1] or temperatures != [0.0]):
        raise InvalidParameter("--transformers", True, "given with --concurrency 1 and --temperature 0")
    from paceline.bench.workloads import open_workloads

    names = [name for text in args.workload or ["sample"] for name in text.split(",")]
    workloads = open_workloads(names, args.prompts)
    require_engine()
    from paceline.bench.bench_run import BenchPlan

    return BenchPlan(
        workloads=workloads,
        concurrencies=concurrencies,
        temperatures=temperatures,
        pools=_POOLS[args.pool],
        rounds=args.rounds,
        max_tokens=args.max_tokens,
    )


def _lengths(text: str) -> list[int | None]:
    auto = [part for part in text.split(",") if part == "auto"]
    rest = ",".join(part for part in text.split(",") if part != "auto")
    return [*([None] if auto else []), *(int(v) for v in numbers("--draft-length", rest, whole=True) if rest)]


def _setup(args: argparse.Namespace, plan: BenchPlan) -> dict[str, Any]:
    """What results of one file must have in common."""
    from paceline.bench.probe import processor_name

    return {
        "program": "bench",
        "model": Path(args.model).name,
        "draft": [Path(d).name for d in args.draft or []],
        "workloads": [w.kind for w in plan.workloads],
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "processor": processor_name(),
    }


def _results(args: argparse.Namespace, setup: dict[str, Any], stack: Any) -> ResultFile:
    """The file of --output, or one that is thrown away."""
    import tempfile

    from paceline.bench.results import ResultFile

    path = args.output
    if path is None:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "results.jsonl"
    return stack.enter_context(ResultFile(path, setup))


def _engine(args: argparse.Namespace, plan: BenchPlan) -> dict[str, Any]:
    from contextlib import ExitStack

    import torch

    from paceline.bench.bench_run import TRANSFORMERS, ArmSpec, arms_of, measure
    from paceline.bench.summary import summarise_bench
    from paceline.core.records import StepRecord
    from paceline.decode.llm import LLM

    records: list[StepRecord] = []
    lengths = _lengths(args.draft_length)
    llm = LLM(
        args.model,
        draft=args.draft or "auto",
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        device=args.device,
        threads=args.threads,
        max_context=args.max_context,
        max_batch=max(8, *plan.concurrencies),
        prefix_cache=False,  # a prompt run again is measured again
        on_record=records.append,
        progress=show_progress,
    )
    arms = arms_of(llm, lengths)
    if args.transformers:
        arms.append(ArmSpec(TRANSFORMERS, None, None))
    if args.screen is not None:
        arms = _screened(args, plan, llm, arms)
        say(f"arms: {', '.join(a.name for a in arms)}")
    setup = _setup(args, plan) | {
        "dtype": llm.precision,
        "threads": torch.get_num_threads(),
        "arms": [a.name for a in arms],
    }
    with ExitStack() as stack:
        results = _results(args, setup, stack)
        found, probe = measure(llm, arms, records, plan, results, progress_bar)
        return summarise_bench(found, arms, setup, probe, _gaps(llm, plan, found))


def _screened(args: argparse.Namespace, plan: BenchPlan, llm: Any, arms: Sequence[Any]) -> list[Any]:
    from paceline.bench.bench_run import best_fixed
    from paceline.bench.probe import ProbeOptions, run_probe
    from paceline.plan.probe_file import read_probe

    if args.probe is not None:
        probe = read_probe(args.probe)
    else:
        options = ProbeOptions(
            budget_s=30.0, temperatures=tuple(plan.temperatures), max_tokens=min(plan.max_tokens, 96)
        )
        probe = run_probe(llm, plan.workloads, options, progress_bar)
    return best_fixed(probe, arms, plan.concurrencies, args.screen)


def _gaps(llm: Any, plan: BenchPlan, found: Sequence[Any]) -> Callable[[Any, int], float | None]:
    """How wide a run's text parts from plain's, by asking the target once more."""
    from paceline.bench.bench_run import PLAIN, gap_between
    from paceline.bench.probe import chat_ids

    prompts = {(w.kind, p.id): p for w in plan.workloads for p in w.prompts}
    plain = {r.key.pair: r.sample.token_ids for b in found if b.key.arm == PLAIN for r in b.runs}

    def gap(run: Any, index: int) -> float | None:
        ids = chat_ids(llm, prompts[run.key.kind, run.key.prompt])
        return gap_between(llm, ids, run.sample.token_ids, plain[run.key.pair], index)

    return gap


def _servers(args: argparse.Namespace, plan: BenchPlan) -> dict[str, Any]:
    from contextlib import ExitStack

    from paceline.bench.bench_run import ArmSpec, run_blocks
    from paceline.bench.server_load import ServerLoad, parse_server
    from paceline.bench.summary import summarise_bench

    _refuse_engine_options(args)
    servers = dict(parse_server(text) for text in args.url)
    if len(servers) < len(args.url):
        raise InvalidParameter("--url", ", ".join(args.url), "each under a name of its own", "Write NAME=URL.")
    arms = [ArmSpec(name, None, None) for name in servers]
    key = os.environ.get("OPENAI_API_KEY")
    loads = {name: ServerLoad(address, args.model, plan.max_tokens, key) for name, address in servers.items()}
    setup = _setup(args, plan) | {"arms": list(servers), "servers": list(servers.values())}
    with ExitStack() as stack:
        found = run_blocks(plan, loads, _results(args, setup, stack), progress_bar)
        return summarise_bench(found, arms, setup)


def _refuse_engine_options(args: argparse.Namespace) -> None:
    """What a server decides itself."""
    given = {
        "--draft": args.draft, "--draft-dtype": args.draft_dtype, "--threads": args.threads,
        "--max-context": args.max_context, "--screen": args.screen,
        "--dtype": None if args.dtype == "auto" else args.dtype,
        "--device": None if args.device == "auto" else args.device,
        "--draft-length": None if args.draft_length == "auto,0" else args.draft_length,
        "--transformers": args.transformers or None,
        "--pool": None if args.pool == "cold" else args.pool,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise InvalidParameter(name, value, "nothing with --url: the server decides that")
