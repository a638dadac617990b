"""What `deterministic=True` costs: the same passes with their products whole and cut into tiles.

    python bench/deterministic_cost.py --model MODEL [--dtype bfloat16] [--rows 8 16 32 48 64 96 128]

A pass is a verify block of `rows / sequences` tokens for each of 8 sequences (or of as many as divide the
rows) at a context of `--context` tokens. Whole and tiled passes take turns, and change who goes first, for
`--repeats` turns; the table gives the medians, the middle half of each, and the median of the paired ratios
with its middle half. No text is made: it is the time of the passes alone. The tile is the row
count up to which independence was tried: passes up to that many rows are the same in both modes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from paceline import LLM, PacelineError
from paceline.bench.speed_report import markdown
from paceline.decode.cache import KVCache
from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, StepInputs, build_inputs
from paceline.errors import InvalidParameter

SEQUENCES = 8


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        print(measure(args))
    except PacelineError as error:
        print(f"deterministic_cost.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 48, 64, 96, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> str:
    """The table of all row counts, as Markdown."""
    check("rows", min(args.rows), 1)
    check("repeats", args.repeats, 2)
    check("context", args.context, 0)
    llm = LLM(args.model, draft="none", dtype=args.dtype, threads=args.threads, max_batch=1, progress=say)
    model = llm.engine.model
    longest = args.context + max(args.rows)
    if longest > llm.checkpoint.max_positions:
        most = llm.checkpoint.max_positions - max(args.rows)
        raise InvalidParameter("context", args.context, f"up to {most} for these rows")
    cache = model.new_cache(SEQUENCES, longest)
    cache.reserve_capacity(longest)
    lines = []
    for rows in args.rows:
        say(f"{rows} rows")
        lines.append(line(rows, *times(model, cache, rows, args.context, args.repeats)))
    head = ["rows", "whole, ms", "middle half", "tiled, ms", "middle half", "tiled / whole", "middle half"]
    policy, threads = model.row_policy, torch.get_num_threads()
    return (
        f"{args.dtype}, {threads} threads, context {args.context}; tiles of {policy.tile} rows, "
        f"rows padded to {policy.multiple}\n\n{markdown(head, lines)}"
    )


def check(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidParameter(name, value, f"a whole number from {low}")


def times(
    model: TargetModel, cache: KVCache, rows: int, context: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of `repeats` whole and tiled passes, in pairs; one pair before them is thrown away."""
    both = [inputs(model, cache, rows, context, tiled) for tiled in (False, True)]
    taken: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for which in (0, 1) if repeat % 2 else (1, 0):
            began = time.perf_counter()
            float(model.forward(both[which], cache).logits[0, 0])
            if repeat:
                taken[which].append(time.perf_counter() - began)
    return taken


def inputs(model: TargetModel, cache: KVCache, rows: int, context: int, tiled: bool) -> StepInputs:
    sequences = max(n for n in range(1, SEQUENCES + 1) if rows % n == 0)
    spans = [Span(slot, context, [1] * (rows // sequences)) for slot in range(sequences)]
    return build_inputs(spans, cache.capacity, model.geometry, model.row_policy, tiled)


def line(rows: int, whole: Sequence[float], tiled: Sequence[float]) -> list[str]:
    ratios = [t / w for w, t in zip(whole, tiled, strict=True)]
    cells = [str(rows)]
    for values, scale, digits in ((whole, 1e3, 1), (tiled, 1e3, 1), (ratios, 1.0, 2)):
        low, middle, high = (scale * q for q in statistics.quantiles(values, n=4))
        cells += [f"{middle:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
    return cells


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
