"""Answers that must fit a JSON schema, with and without speculation: all valid, the same texts, and their times.

    python bench/grammar.py --model MODEL [--draft auto] [--requests 200] [--concurrency 8] [--temperature 0.8]

The prompts ask for the slots of a request (SNIPS); each has a schema of its own: the intent, and lists of short strings
for the keys that its prompt names. Blocks of `--block` requests run with --draft and without in a turning order, in
one process, `--concurrency` at a time; no run drafts from another run's answers. Speed is all tokens of a block over
its whole time, prompts and compiling included; the ratio is the geometric mean over blocks with a bootstrap interval
of 95 %.

Ends with exit code 1 where an answer that was not cut does not fit its schema, where one was cut by --tokens, or where
drafting changed a text. --seconds ends after the block in which it ran out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.paired import arm_order, bootstrap_interval, geometric_mean
from paceline.bench.workloads import workloads_folder
from paceline.core.grammar import Grammar
from paceline.decode.sequence import DraftSettings
from paceline.errors import UsageError

FILE = Path("workloads") / "json_extraction_snips" / "snips_slots.jsonl"


@dataclass(frozen=True, slots=True)
class Task:
    prompt: str
    schema: dict[str, Any]


@dataclass(slots=True)
class Block:
    """One block by one arm."""

    texts: list[str]
    cut: int
    invalid: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    seconds: float


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        tasks = read_tasks(args.shared / FILE, args.requests)
        llm = LLM(
            args.model, draft=args.draft, dtype=args.dtype, threads=args.threads, max_batch=args.concurrency,
            max_context=1024, prefix_cache=False,
        )  # fmt: skip
        pairs = measure(llm, tasks, args)
    except PacelineError as error:
        print(f"grammar.py: {error}", file=sys.stderr)
        return error.exit_code
    return report(pairs, args)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--block", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent, help="folder that holds workloads/")
    return parser.parse_args(argv)


def read_tasks(path: Path, count: int) -> list[Task]:
    """Requests spread over the whole file. Raises UsageError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; name its folder by --shared") from error
    intents = sorted({row["intent"] for row in rows})
    chosen = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    return [Task(row["prompt"], schema_of(row["prompt"], intents)) for row in chosen]


def schema_of(prompt: str, intents: list[str]) -> dict[str, Any]:
    found = re.search(r"keys from (\[.*?\])", prompt)
    keys: list[str] = json.loads(found[1]) if found else []
    text = {"type": "string", "minLength": 1, "maxLength": 24}
    values = {"type": "array", "items": text, "minItems": 1, "maxItems": 2}
    return {
        "type": "object",
        "properties": {"intent": {"enum": intents}} | dict.fromkeys(keys, values),
        "required": ["intent"],
        "additionalProperties": False,
    }


def measure(llm: LLM, tasks: list[Task], args: argparse.Namespace) -> list[tuple[Block, Block]]:
    """Drafted and plain blocks, in pairs."""
    until = time.perf_counter() + args.seconds
    run_block(llm, tasks[: args.concurrency], False, -1)
    pairs = []
    for number, first in enumerate(range(0, len(tasks), args.block)):
        if pairs and time.perf_counter() > until:
            break
        block = tasks[first : first + args.block]
        ran = {
            arm: run_block(llm, block, arm == "drafted", number, args)
            for arm in arm_order(["drafted", "plain"], number, 0)
        }
        pairs.append((ran["drafted"], ran["plain"]))
    return pairs


def run_block(
    llm: LLM, tasks: Sequence[Task], drafted: bool, number: int, args: argparse.Namespace | None = None
) -> Block:
    temperature, tokens = (args.temperature, args.tokens) if args is not None else (0.8, 16)
    assert llm.tokenizer is not None, "the prompts are text"
    params = [
        SamplingParams(
            temperature=temperature, seed=1000 * number + i, max_tokens=tokens, grammar=Grammar.from_schema(task.schema)
        )
        for i, task in enumerate(tasks)
    ]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": task.prompt}]) for task in tasks]
    began = time.perf_counter()
    outputs = llm.generate(
        prompts, params, draft=llm.defaults if drafted else DraftSettings(), tenant=f"{number} {drafted}"
    )
    seconds = time.perf_counter() - began
    done = [output.completions[0] for output in outputs]
    whole = [(d.text, t.schema) for d, t in zip(done, tasks, strict=True) if d.finish_reason == "stop"]
    return Block(
        [d.text for d in done],
        cut=len(done) - len(whole),
        invalid=sum(not fits(text, schema) for text, schema in whole),
        tokens=sum(len(d.token_ids) for d in done),
        rounds=sum(d.stats.rounds for d in done),
        drafted=sum(d.stats.drafted for d in done),
        accepted=sum(d.stats.accepted for d in done),
        seconds=seconds,
    )


def fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def report(pairs: Sequence[tuple[Block, Block]], args: argparse.Namespace) -> int:
    """Prints what was found; the exit code."""
    blocks = [block for pair in pairs for block in pair]
    different = sum(a != b for one, other in pairs for a, b in zip(one.texts, other.texts, strict=True))
    cut, invalid = sum(b.cut for b in blocks), sum(b.invalid for b in blocks)
    requests = sum(len(one.texts) for one, _ in pairs)
    print(
        f"{Path(args.model).name}, {args.dtype}, {args.threads} threads, {requests} requests, {args.concurrency} at a "
        f"time, T = {args.temperature:g}: {invalid} of {2 * requests} answers invalid, {cut} cut, "
        f"{different} texts differ"
    )
    for name, side in ((args.draft, [one for one, _ in pairs]), ("none", [other for _, other in pairs])):
        tokens, seconds, rounds = (sum(getattr(b, f) for b in side) for f in ("tokens", "seconds", "rounds"))
        accepted, drafted = sum(b.accepted for b in side), sum(b.drafted for b in side)
        print(
            f"{name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
            f"{tokens / max(rounds, 1):.2f} a round; {accepted} of {drafted} drafts accepted"
        )
    ratios = [one.tokens / one.seconds / (other.tokens / other.seconds) for one, other in pairs]
    low, high = bootstrap_interval(ratios, seed=0) if len(ratios) > 1 else (float("nan"), float("nan"))
    print(f"speed with over without: {geometric_mean(ratios):.3f} ({low:.3f} to {high:.3f}) over {len(ratios)} blocks")
    return 1 if cut or invalid or different else 0


if __name__ == "__main__":
    sys.exit(main())
