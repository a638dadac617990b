"""`paceline run`: continue one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import add_engine_options, add_sampling_options, build_llm, build_params, say, speed_line
from paceline.core.grammar import Grammar
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.output import RequestOutput
    from paceline.decode.llm import LLM

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "run",
        help="continue a prompt, streaming",
        description="Continue a prompt, from --prompt, --prompt-file or standard input. The text goes to stdout.",
        allow_abbrev=False,
    )
    add_engine_options(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", type=Path, metavar="FILE")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    add_sampling_options(parser)
    _add_grammar_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    params = replace(build_params(args), grammar=_grammar(args))
    prompt: Any = _read_prompt(args)
    llm = build_llm(args)
    stream = llm.stream([{"role": "user", "content": prompt}] if args.chat else prompt, params)
    for delta in stream:
        if not args.json:
            print(delta.text, end="", flush=True)
    llm.close()
    for alarm in llm.alarms:
        say(f"paceline: {alarm}")
    done = stream.output.completions[0]
    if done.error is not None:
        say(f"paceline: {done.error}")
        return 1
    if args.json:
        print(json.dumps(result(llm, stream.output)))
    else:
        print()
        say(speed_line(done))
    return 0


def result(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """The object of --json."""
    done = output.completions[0]
    stats = done.stats
    return {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(done.token_ids),
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        },
        "rounds": stats.rounds,
        "acceptance_length": stats.acceptance_length,
        "tokens_per_round": stats.tokens_per_round,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": {"load": llm.load_s, "prefill": stats.prefill_s, "decode": stats.decode_s, "saved": stats.saved_s},
        "verify": done.verify,
        "lossless_rule": done.lossless,
    }


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is not None:
        return _read_file("prompt file", args.prompt_file)
    if sys.stdin.isatty():
        say("type the prompt, then Ctrl-D")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8 text.") from error


def _read_file(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} {path} is not UTF-8 text.") from error


def _add_grammar_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the whole text must match").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that fits the schema in FILE")
    group.add_argument("--regex", metavar="PATTERN", help="a regular expression, from end to end")
    group.add_argument("--grammar", type=Path, metavar="FILE", help="a grammar in GBNF or Lark's notation")


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.json_schema is not None:
        return Grammar("json_schema", _read_file("schema", args.json_schema))
    if args.regex is not None:
        return Grammar("regex", args.regex)
    if args.grammar is not None:
        return Grammar.from_rules(_read_file("grammar", args.grammar))
    return None
