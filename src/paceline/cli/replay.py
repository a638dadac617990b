"""`paceline replay`: what a way to choose draft lengths would have done over a recorded trace or a probe."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    p = subparsers.add_parser(
        "replay",
        help="run a controller over a trace or a probe, offline: what it would have done, and the best possible",
        description="Prices and acceptance come from the file. A trace knows only drafts that were tried, so what is "
        "said of longer ones is a lower bound; a probe knows all.",
        allow_abbrev=False,
    )
    p.add_argument("file", type=Path, metavar="TRACE|PROBE", help="written by --trace, or by probe --output")
    p.add_argument(
        "--controller",
        action="append",
        metavar="NAME",
        help="auto, plain, oracle, or DRAFTER:D for a fixed length; repeatable (default: all of these)",
    )
    p.add_argument("--batch", type=int, default=1, metavar="N", help="alike sequences together (default: 1)")
    p.add_argument("--probe", type=Path, metavar="FILE", help="take the prices from this probe")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints a line a policy; exit code 0."""
    from paceline.errors import InvalidParameter
    from paceline.plan.policies import default_policies, run_policies
    from paceline.plan.probe_file import read_probe
    from paceline.report.replay_text import replay_text

    if args.batch < 1:
        raise InvalidParameter("--batch", args.batch, "a whole number from 1")
    probe = _read(args.file, args.probe is not None)
    if args.probe is not None:
        prices = read_probe(args.probe)
        missing = {d.name for d in probe.drafters} - {d.name for d in prices.drafters}
        if missing:
            raise InvalidParameter("--probe", str(args.probe), f"a probe that measured {', '.join(sorted(missing))}")
        probe = dataclasses.replace(probe, passes=prices.passes, drafters=prices.drafters)
        probe = _only(probe)
    outcomes = run_policies(probe, args.controller or default_policies(probe), args.batch)
    if args.json:
        rows = [
            {**dataclasses.asdict(o), "lengths": [[n, k, count] for (n, k), count in o.lengths.items()]}
            for o in outcomes
        ]
        print(json.dumps({"model": probe.model, "texts": len(probe.texts), "policies": rows}))
    else:
        print(replay_text(probe, outcomes, args.batch))
    return 0


def _read(path: Path, priced: bool) -> Any:
    """A probe, or a trace read as one; `priced`: prices come from elsewhere."""
    from paceline.core.records import SCHEMA
    from paceline.errors import UsageError
    from paceline.plan.probe_file import read_probe
    from paceline.plan.trace_texts import probe_of_trace

    try:
        with path.open(encoding="utf-8") as file:
            first = file.read(200)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return probe_of_trace(path, priced) if SCHEMA in first else read_probe(path)


def _only(probe: Any) -> Any:
    """The drafters that have drafts in the texts."""
    known = {name for text in probe.texts for name in text.drafts}
    return dataclasses.replace(probe, drafters=tuple(d for d in probe.drafters if d.name in known))
