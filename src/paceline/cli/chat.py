"""`paceline chat`: a conversation in the terminal, by the model's own chat template."""

from __future__ import annotations

import argparse
import sys

from paceline.cli.options import add_engine_options, add_sampling_options, build_llm, build_params, say, speed_line
from paceline.errors import ContextOverflow, UsageError

__all__ = ["add_parser", "run"]

_HELP = "Type a message; an empty line is skipped. /new starts over, /exit (or Ctrl-D) leaves."


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation in the terminal, streaming. " + _HELP,
        allow_abbrev=False,
    )
    add_engine_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    params = build_params(args)
    llm = build_llm(args)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise UsageError(f"{args.model} has no chat template; use `paceline run` with a plain prompt.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    say(_HELP)
    while (line := _read()) is not None:
        if line == "/exit":
            break
        if line == "/new":
            messages = list(opening)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = llm.stream(messages, params)
        except ContextOverflow as error:
            say(f"{error} Or start over with /new.")
            messages.pop()
            continue
        try:
            for delta in stream:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print()
        done = stream.output.completions[0]
        messages.append({"role": "assistant", "content": done.text})
        say(done.error or speed_line(done))
    llm.close()
    return 0


def _read() -> str | None:
    """The next message, None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None
