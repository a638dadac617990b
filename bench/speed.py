"""How fast, on what: Transformers' `generate`, plain decoding and drafting, on the same prompts side by side.

    python bench/speed.py --model MODEL --output FILE [--draft DRAFT] [--arms transformers plain auto]

Arms: `transformers` (the same weights through `AutoModelForCausalLM.generate`, its default attention),
`plain` (ours, no drafter), `auto` (ours, the best model-free drafter each round), and with `--draft`: `draft`
(ours, the draft model alone, its length chosen each round) and `auto+draft` (the best of all each round).
Greedy, one request at a time, the model's chat template, natural stops up to `--max-tokens`.

Each prompt runs by every arm in a turning order, `--rounds` times, all in one process. Both engines are timed
from outside: a run's speed is its tokens after the first over the seconds from the first to the last.
`--pool cold` (the default) lets no run draft from an earlier answer; `--pool kind` from answers to other
prompts of its kind.

FILE has a line for every (prompt, arm, round); started again with the same arguments the program goes on
where it was. `--report` only prints the tables of what is there. Tables are Markdown on stdout; progress is
on stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.paired import POOLS, Arm, Run, RunKey, Sample, first_speed, run_paired
from paceline.bench.reference import Reference
from paceline.bench.results import ResultFile
from paceline.bench.speed_report import arm_table, looping_prompts, partings, ratio_table
from paceline.bench.workloads import KINDS, WorkloadPrompt, load_workload
from paceline.core.output import Completion
from paceline.core.records import StepRecord
from paceline.decode.draft.build import DraftModel, build_drafters, parse_drafts
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.sequence import DraftSettings
from paceline.errors import InvalidParameter, RequestFailed, UsageError

MIX = ("chat", "code", "code_edit", "maths", "json", "multilingual")
BASES = {"plain": "transformers", "auto": "plain", "draft": "plain", "auto+draft": "plain"}
ARMS = ("transformers", *BASES)
BY_MODEL = ("draft", "auto+draft")
SHOWN_PARTINGS = 20


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        arms = chosen_arms(args.arms, args.draft)
        with ResultFile(args.output, description(args)) as results:
            if not args.report:
                measure(args, arms, results)
            report([Run.of_row(row) for row in results.rows], arms)
    except PacelineError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--draft", help="a smaller model of the same vocabulary")
    parser.add_argument("--output", required=True, type=Path, help="results, one a line")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all there are")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(MIX))
    parser.add_argument("--prompts-per-kind", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--pool", default="cold", choices=POOLS)
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder that holds workloads/")
    parser.add_argument("--report", action="store_true", help="print the tables, measure nothing")
    return parser.parse_args(argv)


def shared_folder() -> Path:
    """`PACELINE_SHARED`, or the folder `shared` beside the checkout."""
    named = os.environ.get("PACELINE_SHARED")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared"


def chosen_arms(asked: Sequence[str] | None, draft: str | None) -> list[str]:
    """The arms in the order of the tables. Raises InvalidParameter for an arm that needs a draft model."""
    possible = [a for a in ARMS if draft is not None or a not in BY_MODEL]
    for arm in asked or ():
        if arm not in possible:
            raise InvalidParameter("arms", arm, ", ".join(possible), "Give --draft for the others.")
    return [a for a in possible if asked is None or a in asked]


def description(args: argparse.Namespace) -> dict[str, object]:
    """What results of one file must have in common."""
    return {
        "program": "speed",
        "model": Path(args.model).name,
        "draft": None if args.draft is None else Path(args.draft).name,
        "dtype": args.dtype,
        "threads": args.threads,
        "max_tokens": args.max_tokens,
        "pool": args.pool,
        "processor": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


# -- measuring ---------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, names: Sequence[str], results: ResultFile) -> None:
    """Make the runs that are missing."""
    folder = args.shared / "workloads"
    workloads = [load_workload(kind, folder, args.prompts_per_kind) for kind in args.kinds]
    done = {Run.of_row(row).key for row in results.rows}
    wanted = [
        RunKey(w.kind, p.id, a, r)
        for w in workloads
        for p in w.prompts
        for a in names
        for r in range(args.rounds)
    ]
    missing = sum(key not in done for key in wanted)
    if missing == 0:
        return
    arms = build_arms(args, names)
    warm_up(arms, workloads[0].prompts[0])
    began = time.perf_counter()
    runs = run_paired(workloads, arms, args.rounds, done=done, pool=args.pool)
    for count, run in enumerate(runs, start=1):
        results.append(run.row())
        left = (time.perf_counter() - began) / count * (missing - count)
        tokens, seconds = len(run.sample.token_ids), run.sample.decode_s
        key = run.key
        say(
            f"{count}/{missing} round {key.round} {key.kind} {key.prompt} {key.arm}: {tokens} tokens, "
            f"{(tokens - 1) / seconds if seconds else 0:.1f} tokens/s; about {left / 60:.0f} min left"
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_arms(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Arm]:
    """Every arm, ready to run. All of ours share one engine, one cache and one copy of the weights."""
    torch.set_num_threads(args.threads)
    records: list[StepRecord] = []
    drafts = ["auto"] if "auto" in names else ["none"]
    if any(name in BY_MODEL for name in names):
        drafts = ["auto", f"model:{args.draft}"]
    llm = LLM(
        args.model,
        draft=drafts,
        dtype=args.dtype,
        threads=args.threads,
        max_batch=1,
        on_record=records.append,
        progress=say,
    )
    if len(drafts) > 1:
        split_auto(llm)
    drafters = {"plain": "none", "auto": "auto", "draft": f"model:{args.draft}", "auto+draft": "auto+draft"}
    arms: dict[str, Arm] = {}
    for name in names:
        if name == "transformers":
            arms[name] = transformers_arm(args, llm)
        else:
            arms[name] = our_arm(llm, DraftSettings(drafters[name]), records, args.max_tokens)
    return arms


def split_auto(llm: LLM) -> None:
    """What the engine calls `auto` chooses among all it has: name that `auto+draft`, and let `auto` be over
    the model-free drafters alone, as it is without a draft model."""
    free = build_drafters(
        parse_drafts(["auto"]),
        llm.engine.model,
        max_batch=1,
        max_draft=llm.engine.options.max_draft,
        load=_no_model,
    )
    for known, fresh in ((llm.draft_set.drafters, free.drafters), (llm.draft_set.choosers, free.choosers)):
        known["auto+draft"] = known["auto"]
        known["auto"] = fresh["auto"]


def _no_model(spec: str) -> DraftModel:
    raise AssertionError(f"the model-free drafters asked for the model {spec}")


def our_arm(llm: LLM, settings: DraftSettings, records: list[StepRecord], max_tokens: int) -> Arm:
    def run(prompt: WorkloadPrompt, tenant: str) -> Sample:
        ids, params = chat_ids(llm, prompt), SamplingParams(max_tokens=max_tokens)
        records.clear()
        began = time.perf_counter()
        stream = llm.stream(ids, params, draft=settings, tenant=tenant)
        times = [time.perf_counter() - began for delta in stream if delta.token_ids]
        sample = sample_of(len(ids), stream.output.completions[0], times)
        rounds = [r for r in records if r.kind != "prefill"]
        return replace(
            sample,
            target_s=sum(r.verify_s for r in rounds),
            draft_s=sum(r.draft_s for r in rounds),
            other_s=sum(r.other_s for r in rounds),
        )

    return run


def sample_of(prompt_tokens: int, completion: Completion, times: Sequence[float]) -> Sample:
    """An answer of ours; `times` are the seconds after the call at which its deltas came."""
    if completion.error is not None:
        raise RequestFailed(completion.error)
    stats = completion.stats
    return Sample(
        prompt_tokens=prompt_tokens,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        first_s=times[0],
        decode_s=times[-1] - times[0],
        rounds=stats.rounds,
        draft_rounds=stats.draft_rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        emitted=stats.emitted,
        emitted_in_draft_rounds=stats.emitted_in_draft_rounds,
    )


def transformers_arm(args: argparse.Namespace, llm: LLM) -> Arm:
    reference = Reference(load_checkpoint(args.model, dtype=llm.dtype, progress=say))
    ends = llm.checkpoint.eos_token_ids

    def run(prompt: WorkloadPrompt, tenant: str) -> Sample:
        ids = chat_ids(llm, prompt)
        output = reference.generate(ids, args.max_tokens)
        return Sample(
            prompt_tokens=len(ids),
            token_ids=output.token_ids,
            finish_reason="stop" if output.token_ids[-1] in ends else "length",
            first_s=output.times_s[0],
            decode_s=output.times_s[-1] - output.times_s[0],
        )

    return run


def chat_ids(llm: LLM, prompt: WorkloadPrompt) -> list[int]:
    if llm.tokenizer is None:
        raise UsageError("this model comes without a tokenizer; speed is measured on text.")
    return llm.tokenizer.encode_chat(prompt.messages)


def warm_up(arms: Mapping[str, Arm], prompt: WorkloadPrompt) -> None:
    """One answer by each arm, thrown away: the first call of anything is slower."""
    for name, arm in arms.items():
        say(f"warming up {name}")
        arm(prompt, f"warm-up/{name}")


# -- reporting ---------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], names: Sequence[str]) -> None:
    """The tables of the arms in `names`, over all prompts and again without those that loop."""
    runs = [run for run in runs if run.key.arm in names]
    names = [name for name in names if any(run.key.arm == name for run in runs)]
    if not runs:
        print("no results yet")
        return
    pairs = {arm: base for arm, base in BASES.items() if arm in names and base in names}
    looping = looping_prompts(runs)
    kept = [r for r in runs if (r.key.kind, r.key.prompt) not in looping]
    parts = [("All outputs", runs)]
    if looping and kept:
        parts.append(("Without the prompts whose outputs loop", kept))
    for title, own in parts:
        print(f"## {title}\n")
        if pairs:
            print("Decode speed (geometric mean over prompts, 95 % interval by prompt):\n")
            print(ratio_table(own, pairs) + "\n")
            print("Speed to the first token:\n")
            print(ratio_table(own, pairs, first_speed) + "\n")
        print(arm_table(own, names, "plain", BY_MODEL) + "\n")
    parted = partings([r for r in runs if r.key.arm != "transformers"], "plain")
    print(f"Runs of ours whose text parts from plain's: {len(parted)}.")
    for run, index in parted[:SHOWN_PARTINGS]:
        print(f"- {run.key.kind} {run.key.prompt}, {run.key.arm}, round {run.key.round}: at token {index}")


if __name__ == "__main__":
    sys.exit(main())
