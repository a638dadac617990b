"""`paceline demo`: the same prompts plainly and speculatively, side by side."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cli.options import add_engine_options, build_llm, say
from paceline.core.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.core.output import Completion
    from paceline.decode.llm import LLM
    from paceline.decode.sequence import DraftSettings

__all__ = ["add_parser", "run"]

_PROMPTS = (
    ("chat", "Give me three tips for a first long-distance bicycle tour."),
    (
        "code edit",
        "Rename the function area to rectangle_area everywhere and output the whole code.\n\n```python\n"
        "def area(width, height):\n    if width < 0 or height < 0:\n"
        "        raise ValueError('sides must not be negative')\n    return width * height\n\n\n"
        "def total_area(rectangles):\n    total = 0\n    for width, height in rectangles:\n"
        "        total += area(width, height)\n    return total\n\n\n"
        "print(area(3, 4))\nprint(total_area([(1, 2), (3, 4)]))\n```",
    ),
    (
        "json",
        'Repeat this JSON with every "city" in capital letters. Output only JSON.\n\n'
        '[{"rider": "A", "city": "Ghent", "km": 120}, {"rider": "B", "city": "Lille", "km": 95}, '
        '{"rider": "C", "city": "Nice", "km": 143}]',
    ),
    (
        "maths",
        "A group of 8 riders each changes the lead every 5 minutes. How many times does the lead change in 2 "
        "hours, and how long is each rider in front? Explain step by step.",
    ),
)


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    plain: Completion
    drafted: Completion

    @property
    def cells(self) -> tuple[str, ...]:
        plain, drafted = _speed(self.plain), _speed(self.drafted)
        length = self.drafted.stats.acceptance_length
        return (
            self.kind,
            str(len(self.plain.token_ids)),
            f"{plain:.1f}",
            f"{drafted:.1f}",
            f"{drafted / plain:.2f}x" if plain else "-",
            "-" if length is None else f"{length:.2f}",
            "yes" if self.same else "NO",
        )

    @property
    def same(self) -> bool:
        failed = self.plain.error or self.drafted.error
        return failed is None and self.plain.token_ids == self.drafted.token_ids


_HEAD = ("prompt", "tokens", "plain tok/s", "speculative tok/s", "speedup", "AL", "identical")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="decode a few prompts plainly and speculatively, and compare",
        description="Decode a few prompts of different kinds plainly, then speculatively; ends with a table.",
        allow_abbrev=False,
    )
    add_engine_options(parser)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(max_tokens=args.max_tokens)
    llm = build_llm(args)
    from paceline.decode.sequence import DraftSettings

    rows = []
    for kind, prompt in _PROMPTS:
        print(f"\n=== {kind}: {prompt.splitlines()[0]}", flush=True)
        print("--- plain", flush=True)
        plain = _answer(llm, prompt, params, DraftSettings())
        print("--- speculative", flush=True)
        rows.append(_Row(kind, plain, _answer(llm, prompt, params, llm.defaults)))
    llm.close()
    print("\n" + _table([_HEAD, *(row.cells for row in rows)]))
    for error in [e for row in rows for e in (row.plain.error, row.drafted.error) if e is not None]:
        say(f"paceline: {error}")
    if not all(row.same for row in rows):
        say("paceline: a speculative text differs from the plain one; that is a bug, please report it")
        return 1
    return 0


def _answer(llm: LLM, prompt: str, params: SamplingParams, draft: DraftSettings) -> Completion:
    chat = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    stream = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params, draft=draft)
    for delta in stream:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    print(flush=True)
    return stream.output.completions[0]


def _speed(done: Completion) -> float:
    return done.stats.emitted / done.stats.decode_s if done.stats.decode_s else 0.0


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
