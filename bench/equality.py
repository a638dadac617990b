"""Is the text the same, whatever drafts, however far, in whatever batch? Counted on real weights.

    python bench/equality.py --model MODEL --output FILE [--dtype bfloat16] [--deterministic]

Greedy and seeded sampling (temperature 0.8, top-p 0.9) of 48 prompts of spec_bench and 16 of code_edit, 64
tokens each; a model without a chat template continues the plain text. The base is plain decoding of 8 prompts
at a time. Against it: every drafter (`model` is the target drafting for itself) at 7 drafts a round on all
prompts; at 1, 3 and 15, and one prompt at a time, on every fourth; in float32 also the greedy texts of
Transformers' `generate`, which may part only where its logits put our token less than 0.001 below its own. In
bfloat16 batches are as large as passes of up to 32 rows allow, or, with `--deterministic`, as in float32 (but
for Transformers).

FILE has a line for every (temperature, arm, draft length, batch, prompt); started again with the same
arguments the program goes on where it was. The table is Markdown on stdout, progress is on stderr. Exit code
1 where a text differs that may not.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.equality import (
    PLAIN,
    TRANSFORMERS,
    Cell,
    base_of,
    compare_references,
    compare_with_base,
    equality_cells,
    summarise,
)
from paceline.bench.reference import Reference
from paceline.bench.results import ResultFile
from paceline.bench.workloads import load_workload, workloads_folder
from paceline.core.output import Completion
from paceline.decode.draft.build import DraftModel, build_drafters, parse_drafts
from paceline.decode.model.checkpoint import inspect_checkpoint, load_checkpoint
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.decode.sequence import DraftSettings
from paceline.errors import RequestFailed, UsageError

DRAFTERS = ("ngram", "suffix", "auto", "model")
SELF_DRAFT = "model:target"
TOP_P, SEED = 0.9, 1000
CHUNK = 32  # prompts between two writes where the batch is the engine's; a smaller one is given at once
KEPT_LOGITS = 16  # of Transformers', best first, before every token


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        cells = equality_cells(
            args.drafters,
            args.temperatures,
            any_rows=args.dtype == "float32" or args.deterministic,
            transformers=args.dtype == "float32",
        )
        with ResultFile(args.output, description(args)) as results:
            if not args.report:
                run(args, cells, results)
            summary = summarise(compare_references(results.rows, cells), cells)
    except PacelineError as error:
        print(f"equality.py: {error}", file=sys.stderr)
        return error.exit_code
    print(summary.table)
    print(f"\nTexts that differ and may not: {summary.failures}.")
    for line in summary.partings:
        print(f"- {line}")
    return 1 if summary.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--output", required=True, type=Path, help="results, one a line")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--spec-bench", type=int, default=48, help="prompts of spec_bench")
    parser.add_argument("--code-edit", type=int, default=16, help="prompts of code_edit")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent, help="folder that holds workloads/")
    parser.add_argument("--report", action="store_true", help="print the table, measure nothing")
    return parser.parse_args(argv)


def description(args: argparse.Namespace) -> dict[str, object]:
    """What results of one file must have in common."""
    return {
        "program": "equality",
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "deterministic": args.deterministic,
        "prompts": [args.spec_bench, args.code_edit],
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "processor": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


# -- the work ----------------------------------------------------------------------------------------------


@dataclass
class Work:
    """Prompts by name, in order, and the results so far."""

    prompts: dict[str, list[int]]
    cells: Sequence[Cell]
    results: ResultFile
    done: int = 0
    began: float = field(default_factory=time.perf_counter)

    def missing(self, cell: Cell) -> list[str]:
        """Names of the prompts this setting still lacks."""
        there = {row["prompt"] for row in self.results.rows if cell.owns(row)}
        names = list(self.prompts)
        return [n for n in (names[::4] if cell.few else names) if n not in there]

    def left(self) -> int:
        return sum(len(self.missing(cell)) for cell in self.cells)

    def put(self, cell: Cell, prompt: str, fields: dict[str, Any]) -> None:
        self.results.append(cell.row() | {"prompt": prompt} | fields)
        self.done += 1

    def tokens(self, cell: Cell, prompt: str) -> list[int]:
        """The tokens that setting gave, where they were kept."""
        rows = (r for r in self.results.rows if cell.owns(r) and r["prompt"] == prompt)
        return next(rows)["token_ids"]

    def say(self, cell: Cell) -> None:
        left = self.left()
        minutes = (time.perf_counter() - self.began) / max(self.done, 1) * left / 60
        length = "" if cell.draft_length is None else f" D={cell.draft_length}"
        say(
            f"T={cell.temperature:g} {cell.arm}{length} batch {cell.batch}: {self.done} texts, "
            f"{left} left, about {minutes:.0f} min"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, cells: Sequence[Cell], results: ResultFile) -> None:
    """Make the texts that are missing: Transformers' first, so that its copy of the weights is gone then."""
    torch.set_num_threads(args.threads)
    work = Work(load_prompts(args), cells, results)
    for cell in [c for c in cells if c.arm == TRANSFORMERS and work.missing(c)]:
        run_transformers(args, work, cell)
    if any(work.missing(c) for c in cells if c.arm != TRANSFORMERS):
        run_ours(args, work)


def load_prompts(args: argparse.Namespace) -> dict[str, list[int]]:
    tokenizer = inspect_checkpoint(args.model, progress=say).tokenizer
    if tokenizer is None:
        raise UsageError("this model comes without a tokenizer; equality is counted on text.")
    prompts = {}
    for kind, count in (("spec_bench", args.spec_bench), ("code_edit", args.code_edit)):
        for prompt in load_workload(kind, args.shared / "workloads", count).prompts if count else ():
            prompts[f"{kind}/{prompt.id}"] = encode(tokenizer, prompt.messages)
    return prompts


def encode(tokenizer: TextTokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """By the model's chat template; of a base model, which has none, the plain text is continued."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def run_ours(args: argparse.Namespace, work: Work) -> None:
    llm = LLM(
        args.model,
        draft="none",
        dtype=args.dtype,
        threads=args.threads,
        max_batch=max(cell.batch for cell in work.cells),
        deterministic=args.deterministic,
        prefix_cache=False,  # a prompt run again is measured again
        progress=say,
    )
    say(f"rows: {llm.engine.model.row_policy}")
    add_drafters(llm)
    for cell in [c for c in work.cells if c.arm != TRANSFORMERS]:
        base = base_of(cell, work.cells)
        full = cell.batch == llm.engine.options.max_batch
        for names in chunks(work.missing(cell), CHUNK if full else cell.batch):
            answers = generate(llm, work, cell, names, args.max_tokens)
            for name, answer in zip(names, answers, strict=True):
                token_ids, stats = answer.token_ids, answer.stats
                own = token_ids if cell == base else work.tokens(base, name)
                fields = compare_with_base(token_ids, own)
                fields |= {"drafted": stats.drafted, "accepted": stats.accepted}
                if cell == base:
                    fields["token_ids"] = token_ids
                if (index := fields["first_difference"]) is not None:
                    fields["gap"] = gap_after(llm, [*work.prompts[name], *own[:index]])
                work.put(cell, name, fields)
            work.say(cell)


def add_drafters(llm: LLM) -> None:
    """All drafters beside the engine's own, the target itself among them: the same weights, another cache."""
    more = build_drafters(
        parse_drafts(["auto", SELF_DRAFT]),
        llm.engine.model,
        max_batch=llm.engine.options.max_batch,
        max_draft=llm.engine.options.max_draft,
        load=lambda _: DraftModel(llm.checkpoint, llm.engine.model),
    )
    llm.draft_set.drafters.update(more.drafters)
    llm.draft_set.auto = more.auto


def generate(llm: LLM, work: Work, cell: Cell, names: Sequence[str], max_tokens: int) -> list[Completion]:
    order = list(work.prompts)
    params = [
        SamplingParams(
            temperature=cell.temperature,
            top_p=1.0 if cell.temperature == 0.0 else TOP_P,
            seed=SEED + order.index(name),
            max_tokens=max_tokens,
        )
        for name in names
    ]
    drafters = {PLAIN: "none", "model": SELF_DRAFT}
    settings = DraftSettings(drafters.get(cell.arm, cell.arm), cell.draft_length)
    outputs = llm.generate([work.prompts[name] for name in names], params, draft=settings)
    completions = [output.completions[0] for output in outputs]
    for completion in completions:
        if completion.error is not None:
            raise RequestFailed(completion.error)
    return completions


def gap_after(llm: LLM, tokens: Sequence[int]) -> float:
    """Between the two highest logits behind `tokens`, where a text of ours parts from the base."""
    params = SamplingParams(max_tokens=1, logprobs=2)
    (entry,) = llm.generate([tokens], params, draft=DraftSettings())[0].completions[0].logprobs or []
    return entry.top[0][1] - entry.top[1][1]


def chunks(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for low in range(0, len(names), size):
        yield names[low : low + size]


# -- Transformers ------------------------------------------------------------------------------------------


def run_transformers(args: argparse.Namespace, work: Work, cell: Cell) -> None:
    """Its greedy texts, with the highest logits before every token: whether ours part is seen afterwards."""
    reference = Reference(load_checkpoint(args.model, dtype=torch.float32, progress=say))
    say(f"Transformers' attention: {reference.attention}")
    for name in work.missing(cell):
        output = reference.generate(work.prompts[name], args.max_tokens, top=KEPT_LOGITS)
        top = [[list(t.ids), [round(x, 6) for x in t.logits]] for t in output.top]
        work.put(cell, name, {"token_ids": list(output.token_ids), "top": top})
        work.say(cell)


if __name__ == "__main__":
    sys.exit(main())
