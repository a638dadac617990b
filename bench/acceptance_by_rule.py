"""AL of `coupled`, `rejection` and `block` at one temperature: on the same proposals, and in runs of their own.

    python bench/acceptance_by_rule.py --model MODEL --draft DRAFT --output FILE [--prompts 40] [--max-tokens 64]

Three arms decode the same prompts with the draft model, D drafts a round, sampled: `coupled`, `rejection`, `block`.

- **Own runs**: AL of each arm as its rounds came out: tokens of rounds that drafted over those rounds.
- **Same proposals**: under `rejection` and `block` every proposal carries the distributions its tokens were drawn
  from. For each, given the very tokens, contexts and both models' probabilities, the drafts that each of the three
  rules keeps on average over its own noise are computed exactly (`bench/expected_acceptance.py`); AL is one more.
  The proposals of both arms count together. Drafts have the same law under all three rules (under `coupled` they are
  drawn with the target's noise; the chance is that of the target drawing the same token, given that the drafter did),
  but where rounds begin is decided by the arm's own rule.

Intervals are the middle 95 % of a bootstrap over prompts; differences are taken on the same resamples. A prompt is a
line of FILE, so that the program goes on where it was. The table is Markdown on stdout, progress is on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.expected_acceptance import expected_accepted
from paceline.bench.results import ResultFile
from paceline.bench.workloads import load_workload, workloads_folder
from paceline.core.proposal import Dense
from paceline.decode.engine import Engine
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.step import StepInputs
from paceline.decode.outcome import Outcome
from paceline.decode.sequence import DraftSettings, Request
from paceline.decode.verify.probabilities import to_probs
from paceline.decode.verify.rules import row_paths

ARMS = ("coupled", "rejection", "block")
RESAMPLES = 4000


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        with ResultFile(args.output, description(args)) as results:
            if not args.report:
                measure(args, results)
            print(table(results.rows))
    except PacelineError as error:
        say(f"acceptance_by_rule.py: {error}")
        return error.exit_code
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target: a .gguf file, a folder, or an id")
    parser.add_argument("--draft", required=True, help="the draft model, the same ways")
    parser.add_argument("--output", required=True, type=Path, help="results, a prompt of an arm a line")
    parser.add_argument("--prompts", type=int, default=40, help="a fifth of them code edits, the rest of spec_bench")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=4, help="prompts decoded together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent)
    parser.add_argument("--report", action="store_true", help="print the table, measure nothing")
    return parser.parse_args(argv)


def description(args: argparse.Namespace) -> dict[str, object]:
    """What results of one file must have in common."""
    names = ("prompts", "max_tokens", "draft_length", "temperature", "dtype")
    models = {"model": Path(args.model).name, "draft": Path(args.draft).name}
    return {"program": "acceptance_by_rule"} | models | {name: getattr(args, name) for name in names}


class Scoring(Engine):
    """An engine that scores every proposal that carries its distribution, by each rule, before it is committed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scores: dict[str, list[dict[str, float]]] = defaultdict(list)

    def _outcomes(self, batch: Any, proposals: Any, *passed: Any) -> list[Outcome]:
        (result,) = (x for x in passed if isinstance(x, ForwardResult))
        (inputs,) = (x for x in passed if isinstance(x, StepInputs))
        for i, (sequence, proposal) in enumerate(zip(batch, proposals, strict=True)):
            if not isinstance(proposal.distribution, Dense):
                continue
            first, count = inputs.logits_of[i]
            rows = result.logits[first : first + count]
            probs = to_probs(rows, sequence.request.params, sequence.prefix, row_paths(proposal)).double()
            draft = probs.new_zeros(len(proposal), probs.shape[1])
            width = min(probs.shape[1], proposal.distribution.probs.shape[1])
            draft[:, :width] = proposal.distribution.probs[:, :width]
            self.scores[sequence.request.request_id].append(expected_accepted(proposal.tokens, probs, draft))
        return super()._outcomes(batch, proposals, *passed)


def measure(args: argparse.Namespace, results: ResultFile) -> None:
    """Every arm over every prompt that has no line yet, `batch` prompts at a time."""
    edits = args.prompts // 5
    folder = args.shared / "workloads"
    kinds = [("spec_bench", args.prompts - edits), ("code_edit", edits)]
    prompts = [
        (f"{kind}/{p.id}", p) for kind, count in kinds if count for p in load_workload(kind, folder, count).prompts
    ]
    done = {(row["arm"], row["prompt"]) for row in results.rows}
    missing = [(arm, i) for arm in ARMS for i in range(len(prompts)) if (arm, prompts[i][0]) not in done]
    if not missing:
        return
    llm = LLM(
        args.model,
        draft=f"model:{args.draft}",
        draft_length=args.draft_length,
        dtype=args.dtype,
        threads=args.threads,
        max_batch=args.batch,
        progress=say,
    )
    began, ended = time.perf_counter(), 0
    for arm in ARMS:
        own = [i for a, i in missing if a == arm]
        for start in range(0, len(own), args.batch):
            some = own[start : start + args.batch]
            for row in run(llm, arm, args, {i: (prompts[i][0], encode(llm, prompts[i][1])) for i in some}):
                results.append(row)
            ended += len(some)
            left = (time.perf_counter() - began) / ended * (len(missing) - ended)
            say(f"{arm}: {start + len(some)} of {len(own)} prompts; about {left / 60:.1f} min left")


def encode(llm: LLM, prompt: Any) -> list[int]:
    if llm.tokenizer is not None and llm.tokenizer.has_chat_template:
        return llm.tokenizer.encode_chat(prompt.messages)
    return llm.encode(prompt.text)


def run(
    llm: LLM, arm: str, args: argparse.Namespace, prompts: dict[int, tuple[str, list[int]]]
) -> list[dict[str, Any]]:
    """One line a prompt; its seed is its number, the same in every arm."""
    engine = Scoring(
        llm.engine.model,
        vocab_size=llm.engine.vocab_size,
        eos_token_ids=llm.engine.eos_token_ids,
        drafters=llm.draft_set.drafters,
        options=llm.engine.options,
    )
    settings = DraftSettings(llm.defaults.drafter, args.draft_length, arm)
    sequences = {}
    for i, (name, ids) in prompts.items():
        params = SamplingParams(temperature=args.temperature, seed=1000 + i, max_tokens=args.max_tokens)
        (sequences[name],) = engine.add(Request(name, tuple(ids), params, settings))
    while engine.has_work:
        engine.step()
    rows = []
    for name, sequence in sequences.items():
        assert sequence.error is None, f"{name}: {sequence.error}"
        scores = engine.scores[name]
        stats = sequence.stats
        rows.append(
            {
                "arm": arm,
                "prompt": name,
                "rounds": stats.draft_rounds,
                "emitted": stats.emitted_in_draft_rounds,
                "proposals": len(scores),
                "expected": {rule: sum(score[rule] for score in scores) for rule in ARMS},
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Both comparisons as Markdown."""
    heads = ("AL", "proposals", *ARMS, "block - rejection", "rejection - coupled", "coupled / rejection")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    same = [row for row in rows if row["proposals"]]
    if same:
        rounds = per_prompt(same, lambda row: row["proposals"])
        kept = {rule: per_prompt(same, lambda row, rule=rule: row["expected"][rule]) + rounds for rule in ARMS}
        lines.append(line("same proposals", kept, dict.fromkeys(ARMS, rounds)))
    own = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    complete = len({tuple(sorted(row["prompt"] for row in some)) for some in own.values()}) == 1
    if complete and own[ARMS[0]]:
        emitted = {arm: per_prompt(own[arm], lambda row: row["emitted"]) for arm in ARMS}
        counted = {arm: per_prompt(own[arm], lambda row: row["rounds"]) for arm in ARMS}
        lines.append(line("own runs", emitted, counted))
    return "\n".join(lines)


def per_prompt(rows: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> np.ndarray:
    """Sums by prompt [prompts], prompts in one order."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row["prompt"]] += value(row)
    return np.array([sums[name] for name in sorted(sums)])


def line(name: str, tokens: dict[str, np.ndarray], rounds: dict[str, np.ndarray]) -> str:
    """AL of each rule, both differences and the ratio, with their intervals."""
    count = len(rounds[ARMS[0]])
    picks = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    lengths = {a: (tokens[a].sum() / rounds[a].sum(), tokens[a][picks].sum(1) / rounds[a][picks].sum(1)) for a in ARMS}
    cells = [with_interval(*lengths[arm]) for arm in ARMS]
    for less, more in (("rejection", "block"), ("coupled", "rejection")):
        cells.append(with_interval(*(a - b for a, b in zip(lengths[more], lengths[less], strict=True))))
    cells.append(with_interval(*(a / b for a, b in zip(lengths["coupled"], lengths["rejection"], strict=True))))
    counts = list(dict.fromkeys(f"{rounds[arm].sum():.0f}" for arm in ARMS))
    return f"| {name} | {', '.join(counts)} | " + " | ".join(cells) + " |"


def with_interval(value: float, resampled: np.ndarray) -> str:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
