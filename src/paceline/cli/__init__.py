"""The command line: one file a verb, each with `add_parser` and `run`. Nothing heavy is imported before a verb runs.

Data goes to stdout, words to stderr. Exit codes: 0 done, 1 our bug, 2 a wrong call or input, 3 nothing feasible.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.errors import PacelineError

__all__ = ["build_parser", "main"]

_VERBS = (
    "run",
    "chat",
    "serve",
    "demo",
    "pull",
    "doctor",
    "probe",
    "bench",
    "replay",
    "plan",
    "explain",
    "whatif",
    "export",
    "calibrate",
    "validate",
)
_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Speculative decoding that is exact, planned, and never slower than plain decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name in _VERBS:
        importlib.import_module(f"paceline.cli.{name}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; a mistake of the caller is one sentence on stderr, never a traceback."""
    try:
        args = build_parser().parse_args(argv)
        code = int(args.func(args))
        sys.stdout.flush()
        return code
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\npaceline: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
