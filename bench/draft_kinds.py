"""What the drafts of several drafters are worth on one target: accepted how often, at what cost, with what speed.

    python bench/draft_kinds.py --model MODEL --draft layer-skip:8 --draft model:PATH [--draft ...]

Arms: `plain`; `auto` over the model-free drafters; each `--draft` at `--draft-length` tokens a round; and `auto+`,
which chooses among all of them. Greedy, one request at a time, the model's chat template, the arms of a prompt one
after the other in a turning order, all in one process. Every arm's text is compared with plain's: a difference ends
the program with exit code 1.

The table is Markdown on stdout: drafts accepted of drafted, tokens a round, milliseconds of drafting per drafted token,
milliseconds of a target pass, tokens per second, and that over plain's of the same prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.workloads import KINDS, load_workload, workloads_folder
from paceline.core.records import StepRecord
from paceline.decode.draft.build import DraftModel, build_drafters, parse_drafts
from paceline.decode.sequence import DraftSettings


@dataclass
class Arm:
    """A drafter and the sums over its answers."""

    settings: DraftSettings
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    def add(self, tokens: list[int], records: Sequence[StepRecord], seconds: float) -> None:
        self.texts.append(tokens)
        self.rounds += len(records)
        self.tokens += sum(r.emitted for r in records)
        self.drafted += sum(r.proposed for r in records)
        self.accepted += sum(r.accepted for r in records)
        self.draft_s += sum(r.draft_s for r in records)
        self.verify_s += sum(r.verify_s for r in records)
        self.seconds += seconds

    def row(self, name: str, plain: Arm) -> str:
        share = f"{self.accepted} of {self.drafted} ({self.accepted / self.drafted:.2f})" if self.drafted else "none"
        per_draft = f"{1e3 * self.draft_s / self.drafted:.2f}" if self.drafted else ""
        speed, base = self.tokens / self.seconds, plain.tokens / plain.seconds
        return (
            f"| {name} | {share} | {self.tokens / self.rounds:.2f} | {per_draft} | "
            f"{1e3 * self.verify_s / self.rounds:.2f} | {speed:.1f} | {speed / base:.3f} |"
        )


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        arms = measure(args)
    except PacelineError as error:
        print(f"draft_kinds.py: {error}", file=sys.stderr)
        return error.exit_code
    print("| drafter | accepted | tokens a round | ms a draft | ms a pass | tokens/s | over plain |")
    print("|---|---|---|---|---|---|---|")
    for name, arm in arms.items():
        print(arm.row(name, arms["plain"]))
    differ = [name for name, arm in arms.items() if arm.texts != arms["plain"].texts]
    print(f"Texts that differ from plain's: {', '.join(differ) or 'none'}.")
    return 1 if differ else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True, action="append", metavar="KIND[:MODEL]")
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chat", "code", "maths", "code_edit"])
    parser.add_argument("--prompts-per-kind", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent, help="folder that holds workloads/")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Arm]:
    records: list[StepRecord] = []
    drafts = ["auto", *args.draft]
    llm = LLM(
        args.model,
        draft=drafts,
        dtype=args.dtype,
        threads=args.threads,
        max_batch=1,
        prefix_cache=False,  # a prompt run again is measured again
        on_record=records.append,
    )
    for note in llm.notes:
        print(note, file=sys.stderr)
    drafters = {"plain": "none", "auto": "free", "auto+": "auto"}
    arms = {name: Arm(DraftSettings(drafter)) for name, drafter in drafters.items()}
    arms |= {str(spec): Arm(DraftSettings(str(spec), args.draft_length)) for spec in parse_drafts(args.draft)}
    add_free(llm)
    workloads = [load_workload(kind, args.shared / "workloads", args.prompts_per_kind) for kind in args.kinds]
    prompts = [llm.tokenizer.encode_chat(p.messages) for w in workloads for p in w.prompts]  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=args.max_tokens)
    for name, arm in arms.items():  # the first call of anything is slower
        llm.generate([prompts[0]], SamplingParams(max_tokens=4), draft=arm.settings, tenant=f"warm/{name}")
    for turn, prompt in enumerate(prompts):
        order = list(arms)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            records.clear()
            began = time.perf_counter()
            done = llm.generate([prompt], params, draft=arms[name].settings, tenant=f"{name}/{turn}")[0].completions[0]
            seconds = time.perf_counter() - began - done.stats.prefill_s
            arms[name].add(done.token_ids, [r for r in records if r.kind != "prefill"], seconds)
        print(f"{turn + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return arms


def add_free(llm: LLM) -> None:
    """`free`: what `auto` is where no other drafter was given."""
    free = build_drafters(parse_drafts(["auto"]), llm.engine.model, max_batch=1, max_draft=15, load=_no_model)
    llm.draft_set.drafters["free"] = free.drafters["auto"]


def _no_model(spec: str) -> DraftModel:
    raise AssertionError(f"the model-free drafters asked for the model {spec}")


if __name__ == "__main__":
    sys.exit(main())
