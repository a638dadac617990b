"""Trees over chains at equal rows: tokens a round, rows, seconds and speed, batch by batch.

    python bench/trees.py --model MODEL [--draft DRAFT] [--arms chain:7 tree:4/7 ...] [--batch 1 8]

An arm is `plain`, `chain:D` (D draft tokens a round) or `tree:D/N` (N draft tokens a round in all, D on the longest
path); the drafter is `suffix`, or the model given with --draft. Prompts of several kinds are mixed, taken in groups of
the batch size, and every group runs by every arm in a turning order, --rounds times, in one process; no run drafts
from an earlier answer. Speed is of decode rounds alone: tokens emitted over their seconds, prompts left out. Ratios
are geometric means over groups, with a bootstrap interval of 95 % over groups (none for one group).

--seconds ends a batch size after the group in which its share of that time ran out. Texts are compared between arms.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.paired import arm_order, bootstrap_interval, geometric_mean
from paceline.bench.workloads import KINDS, WorkloadPrompt, load_workload, workloads_folder
from paceline.core.records import StepRecord
from paceline.decode.sequence import DraftSettings
from paceline.errors import InvalidParameter

ARMS = ["plain", "chain:3", "chain:7", "tree:3/7", "tree:7/7", "tree:7/15"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One group by one arm: sums over its decode rounds; `sequences` are rounds times sequences in them."""

    arm: str
    group: int
    texts: tuple[tuple[int, ...], ...]
    emitted: int
    sequences: int
    rows: int
    rounds: int
    draft_s: float
    target_s: float
    all_s: float

    @property
    def speed(self) -> float:
        return self.emitted / self.all_s


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        arms = {text: settings_of(text, args.draft) for text in args.arms}
        records: list[StepRecord] = []
        llm = LLM(
            args.model,
            draft="suffix" if args.draft is None else f"model:{args.draft}",
            dtype=args.dtype,
            threads=args.threads,
            max_batch=max(args.batch),
            max_context=args.max_context,
            prefix_cache=False,  # a prompt run again is measured again
            on_record=records.append,
        )
        workloads = [load_workload(kind, args.shared / "workloads", args.prompts) for kind in args.kinds]
        prompts = [p for mixed in zip(*(w.prompts for w in workloads), strict=True) for p in mixed]
        for batch in args.batch:
            samples = measure(llm, records, prompts, batch, arms, args)
            print(report(samples, batch, args), flush=True)
    except PacelineError as error:
        print(f"trees.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--draft", help="a smaller model of the same vocabulary (default: suffix drafts)")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chat", "code_edit", "maths", "json"])
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400.0, help="about so long in all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent, help="folder that holds workloads/")
    return parser.parse_args(argv)


def settings_of(arm: str, draft: str | None) -> DraftSettings:
    """The drafting an arm stands for."""
    name = "suffix" if draft is None else f"model:{draft}"
    kind, _, numbers = arm.partition(":")
    try:
        if arm == "plain":
            return DraftSettings()
        if kind == "chain":
            return DraftSettings(name, int(numbers))
        if kind == "tree":
            depth, size = numbers.split("/")
            return DraftSettings(name, int(depth), tree_size=int(size))
    except ValueError:
        pass
    raise InvalidParameter("arms", arm, "plain, chain:D or tree:D/N")


# -- measuring -------------------------------------------------------------------------------------------------


def measure(
    llm: LLM,
    records: list[StepRecord],
    prompts: Sequence[WorkloadPrompt],
    batch: int,
    arms: dict[str, DraftSettings],
    args: argparse.Namespace,
) -> list[Sample]:
    """Whole groups only: each by every arm."""
    groups = batched(prompts, batch)
    until = time.perf_counter() + args.seconds / len(args.batch)
    run_group(llm, records, "warm", -1, groups[0], DraftSettings(), args)
    samples: list[Sample] = []
    for number, (index, group) in itertools.product(range(args.rounds), list(enumerate(groups))):
        if samples and time.perf_counter() > until:
            break
        for arm in arm_order(list(arms), index, number):
            samples.append(run_group(llm, records, arm, index, group, arms[arm], args))
    return samples


def batched(prompts: Sequence[WorkloadPrompt], batch: int) -> list[tuple[WorkloadPrompt, ...]]:
    """Groups of `batch` prompts; what does not fill the last is left out."""
    return [tuple(prompts[i : i + batch]) for i in range(0, len(prompts) - batch + 1, batch)]


def run_group(
    llm: LLM,
    records: list[StepRecord],
    arm: str,
    index: int,
    group: Sequence[WorkloadPrompt],
    settings: DraftSettings,
    args: argparse.Namespace,
) -> Sample:
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=index)
    assert llm.tokenizer is not None, "the prompts are text"
    ids = [llm.tokenizer.encode_chat(prompt.messages) for prompt in group]
    records.clear()
    outputs = llm.generate(ids, params, draft=settings, tenant=f"{arm} {time.perf_counter()}")
    prefills = {r.round for r in records if r.kind == "prefill"}
    decoded = [r for r in records if r.round not in prefills]
    whole = {r.round: r for r in decoded}.values()
    return Sample(
        arm,
        index,
        tuple(tuple(output.completions[0].token_ids) for output in outputs),
        emitted=sum(r.emitted for r in decoded),
        sequences=len(decoded),
        rows=sum(1 + (r.tree_size or r.proposed) for r in decoded),
        rounds=len(whole),
        draft_s=sum(r.draft_s for r in whole),
        target_s=sum(r.verify_s for r in whole),
        all_s=sum(r.draft_s + r.verify_s + r.other_s for r in whole),
    )


# -- reporting -------------------------------------------------------------------------------------------------


def report(samples: Sequence[Sample], batch: int, args: argparse.Namespace) -> str:
    bases = [arm for arm in args.arms if not arm.startswith("tree")]
    groups = len({s.group for s in samples})
    head = ["arm", "tokens/round", "rows", "draft ms", "target ms", "tokens/s", *(f"/ {b}" for b in bases)]
    lines = [
        f"\n{Path(args.model).name}, {Path(args.draft).name if args.draft else 'suffix'}, {args.dtype}, batch {batch}, "
        f"temperature {args.temperature:g}: {groups} groups, up to {args.tokens} tokens, {args.threads} threads; "
        f"{differing(samples)} texts differ between arms\n",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for arm in args.arms:
        own = [s for s in samples if s.arm == arm]
        rounds = sum(s.rounds for s in own)
        cells = [
            arm,
            f"{sum(s.emitted for s in own) / sum(s.sequences for s in own):.2f}",
            f"{sum(s.rows for s in own) / sum(s.sequences for s in own):.1f}",
            f"{1e3 * sum(s.draft_s for s in own) / rounds:.1f}",
            f"{1e3 * sum(s.target_s for s in own) / rounds:.1f}",
            f"{sum(s.emitted for s in own) / sum(s.all_s for s in own):.1f}",
            *(ratio(own, [s for s in samples if s.arm == base]) for base in bases),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio(own: Sequence[Sample], base: Sequence[Sample]) -> str:
    """Speed over the base's, group by group."""
    by_group = []
    for group in sorted({s.group for s in own}):
        one, other = ([s.speed for s in side if s.group == group] for side in (own, base))
        by_group.append(geometric_mean(one) / geometric_mean(other))
    mean = geometric_mean(by_group)
    if len(by_group) < 2:
        return f"{mean:.3f}"
    low, high = bootstrap_interval(by_group, seed=0)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def differing(samples: Sequence[Sample]) -> int:
    """Texts that are not those of the first arm that ran their group."""
    first: dict[int, tuple[tuple[int, ...], ...]] = {}
    return sum(
        one != other
        for s in samples
        for one, other in zip(s.texts, first.setdefault(s.group, s.texts), strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
