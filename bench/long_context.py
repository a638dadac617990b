"""Long prompts: time to the first token and decode speed by context length, beside Transformers.

    python bench/long_context.py --model MODEL [--draft DRAFT] [--contexts 512 1000 4000 8000]

A prompt of L tokens is prose of the workloads (questions of `spec_bench`, one after another) with a task of a
kind at its end, cut at its front so that the whole has L tokens. Arms: `transformers` (the same weights through
`AutoModelForCausalLM.generate`), `plain`, `ngram`, `suffix`, `auto`, and with `--draft` `model`. Each prompt is
run by every arm in a turning order in one process, `--rounds` times. Tables are Markdown on stdout: the median
time to the first token with its middle half, and the ratio to Transformers by the same prompt and round; decode
milliseconds a token and the acceptance length of the rounds that drafted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.paired import arm_order, geometric_mean
from paceline.bench.reference import Reference
from paceline.bench.speed_report import markdown
from paceline.bench.workloads import KINDS, load_workload, workloads_folder
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.sequence import DraftSettings
from paceline.errors import RequestFailed, UsageError

FREE = ("ngram", "suffix", "auto")


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds from the call to the first token and from there to the last; acceptance length where it drafted."""

    first_s: float
    decode_s: float
    tokens: int
    acceptance_length: float | None = None


Arm = Callable[[Sequence[int], str], Sample]
Results = dict[tuple[int, str], dict[tuple[str, int], Sample]]  # (context, arm) -> (task, round) -> sample


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        results = measure(args)
    except PacelineError as error:
        print(f"long_context.py: {error}", file=sys.stderr)
        return error.exit_code
    print(first_token_table(results) + "\n")
    print(decode_table(results))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or an id")
    parser.add_argument("--draft", help="a smaller model of the same vocabulary")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 1000, 4000, 8000])
    parser.add_argument("--arms", nargs="+", help="default: all there are")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["code_edit", "chat"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--shared", type=Path, default=workloads_folder().parent)
    return parser.parse_args(argv)


# -- prompts -----------------------------------------------------------------------------------------------


def build_prompts(llm: LLM, kinds: Sequence[str], context: int, folder: Path) -> dict[str, list[int]]:
    """One prompt of exactly `context` tokens for each kind."""
    if llm.tokenizer is None:
        raise UsageError("this model comes without a tokenizer; prompts are text.")
    filler = "\n\n".join(p.text for p in load_workload("spec_bench", folder, 160).prompts)
    prompts = {}
    for kind in kinds:
        task = load_workload(kind, folder, 1).prompts[0].text
        text = ""
        while len(ids := llm.tokenizer.encode_chat([{"role": "user", "content": text + task}])) < context:
            text = filler + "\n\n" + text
        frame = llm.tokenizer.encode_chat([{"role": "user", "content": ""}])
        head = next(i for i, token in enumerate(frame) if token != ids[i])
        prompts[kind] = ids[:head] + ids[head + len(ids) - context :]
    return prompts


# -- arms --------------------------------------------------------------------------------------------------


def build_arms(args: argparse.Namespace, llm: LLM) -> dict[str, Arm]:
    model = [] if args.draft is None else ["model"]
    names = args.arms or ["transformers", "plain", *FREE, *model]
    arms: dict[str, Arm] = {}
    for name in names:
        if name == "transformers":
            arms[name] = transformers_arm(args, llm)
        elif name in ("plain", *FREE, *model):
            drafter = {"plain": "none", "model": f"model:{args.draft}"}.get(name, name)
            arms[name] = our_arm(llm, DraftSettings(drafter), args.max_tokens)
        else:
            raise UsageError(f"the arm is {name!r}; allowed: transformers, plain, {', '.join([*FREE, *model])}.")
    return arms


def our_arm(llm: LLM, settings: DraftSettings, max_tokens: int) -> Arm:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def run(ids: Sequence[int], tenant: str) -> Sample:
        began = time.perf_counter()
        stream = llm.stream(ids, params, draft=settings, tenant=tenant)
        times = [time.perf_counter() - began for delta in stream if delta.token_ids]
        done = stream.output.completions[0]
        if done.error is not None:
            raise RequestFailed(done.error)
        length = done.stats.acceptance_length if done.stats.draft_rounds else None
        return Sample(times[0], times[-1] - times[0], len(done.token_ids), length)

    return run


def transformers_arm(args: argparse.Namespace, llm: LLM) -> Arm:
    reference = Reference(load_checkpoint(args.model, dtype=llm.dtype, progress=say))

    def run(ids: Sequence[int], tenant: str) -> Sample:
        times = reference.generate(ids, args.max_tokens).times_s
        return Sample(times[0], times[-1] - times[0], len(times))

    return run


# -- measuring ---------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> Results:
    room = max(args.contexts) + args.max_tokens
    drafts = [*FREE, *([] if args.draft is None else [f"model:{args.draft}"])]
    llm = LLM(
        args.model,
        draft=drafts,
        dtype=args.dtype,
        threads=args.threads,
        max_batch=1,
        max_context=room,
        prefix_cache=False,  # a prompt run again is measured again
        progress=say,
    )
    arms = build_arms(args, llm)
    results: Results = defaultdict(dict)
    for context in args.contexts:
        prompts = build_prompts(llm, args.kinds, context, args.shared / "workloads")
        for name, arm in arms.items():
            arm(next(iter(prompts.values()))[-256:], f"warm-up/{name}/{context}")
        for turn in range(args.rounds):
            for place, (kind, ids) in enumerate(prompts.items()):
                for name in arm_order(list(arms), place, turn):
                    sample = arms[name](ids, f"{name}/{kind}/{context}/{turn}")
                    results[context, name][kind, turn] = sample
                    say(f"{context} {kind} {turn} {name}: first {sample.first_s:.2f} s, {per_token(sample):.1f} ms")
    return results


def per_token(sample: Sample) -> float:
    """Milliseconds of a token after the first."""
    return 1e3 * sample.decode_s / max(sample.tokens - 1, 1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- tables ------------------------------------------------------------------------------------------------


def first_token_table(results: Results) -> str:
    rows = []
    for (context, arm), samples in results.items():
        seconds = [s.first_s for s in samples.values()]
        rows.append([str(context), arm, spread(seconds), *ratios(results, context, arm)])
    return markdown(["prompt tokens", "arm", "first token (s)", "Transformers' time / its", "plain's / its"], rows)


def ratios(results: Results, context: int, arm: str) -> list[str]:
    """Of the first token's time, to Transformers and to plain, paired by prompt and round."""
    own = results[context, arm]
    cells = []
    for base in ("transformers", "plain"):
        other: Mapping[tuple[str, int], Sample] = results.get((context, base), {})
        pairs = [other[key].first_s / sample.first_s for key, sample in own.items() if key in other]
        cells.append(spread(pairs) if pairs and base != arm else "")
    return cells


def decode_table(results: Results) -> str:
    kinds = sorted({kind for samples in results.values() for kind, _ in samples})
    rows = []
    for (context, arm), samples in results.items():
        for kind in kinds:
            own = [s for (k, _), s in samples.items() if k == kind]
            lengths = [s.acceptance_length for s in own if s.acceptance_length is not None]
            length = f"{geometric_mean(lengths):.2f}" if lengths else ""
            rows.append([str(context), kind, arm, spread([per_token(s) for s in own]), length])
    return markdown(["context", "task", "arm", "ms a token", "acceptance length"], rows)


def spread(values: Sequence[float]) -> str:
    """Median and middle half."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
