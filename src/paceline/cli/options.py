"""Options that several verbs share: one field, one flag, one help line."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidParameter, MissingExtra

if TYPE_CHECKING:
    from paceline.core.output import Completion
    from paceline.core.records import StepRecord
    from paceline.decode.llm import LLM

__all__ = [
    "add_engine_options",
    "add_model_options",
    "add_sampling_options",
    "build_llm",
    "build_params",
    "end_progress",
    "numbers",
    "progress_bar",
    "require_engine",
    "say",
    "speed_line",
]


def say(text: str) -> None:
    """Words for the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show_progress(text: str) -> None:
    """A line that the next one overwrites on a terminal; nothing where stderr is a file or a pipe."""
    if sys.stderr.isatty():
        print(f"\r{text:<78.78}", end="", file=sys.stderr, flush=True)


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model, its drafters and where they run; returns the group for more."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="smollm2-135m, a Hugging Face id, a folder with safetensors, or a .gguf file",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--draft",
        action="append",
        metavar="KIND[:MODEL]",
        help="none, auto, ngram, suffix, layer-skip[:N], model:PATH; repeatable (default: auto)",
    )
    group.add_argument("--dtype", default="auto", metavar="TYPE", help="float32, bfloat16, int8, int4 or auto")
    group.add_argument("--draft-dtype", metavar="TYPE", help="of a draft model (default: as --dtype)")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    group.add_argument(
        "--max-context", type=int, metavar="N", help="tokens of prompt and answer (default: the model's, <= 4096)"
    )
    return group


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = add_model_options(parser)
    group.add_argument(
        "--draft-length",
        type=_draft_length,
        default=None,
        metavar="N|auto",
        help="draft tokens a round (default: auto)",
    )
    group.add_argument(
        "--tree-size",
        type=int,
        metavar="N",
        help="draft tokens a round in all where proposals branch, --draft-length on a path (default: no branches)",
    )
    group.add_argument(
        "--verify",
        default="coupled",
        metavar="RULE",
        help="acceptance rule: coupled (default), greedy (at temperature 0), rejection, block, or relaxed (not exact)",
    )
    group.add_argument(
        "--relaxed",
        metavar="HOW",
        help="with --verify relaxed: typical:EPSILON,DELTA (default typical:0.09,0.3) or top:COUNT,MARGIN",
    )
    group.add_argument(
        "--max-memory",
        default="auto",
        metavar="BYTES|auto",
        help="for weights, caches and workspace, such as 6GiB (default: auto, 90 %% of what is free)",
    )
    group.add_argument(
        "--deterministic", action="store_true", help="rows independent in passes of any size (costs speed)"
    )
    group.add_argument("--probe", type=Path, metavar="FILE", help="start the controller from a probe of this model")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write a record per round as JSON lines")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: a fresh one)")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-text")


def build_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def build_llm(
    args: argparse.Namespace, max_batch: int = 1, on_record: Callable[[StepRecord], None] | None = None
) -> LLM:
    """The model and its drafters as asked for; says on stderr what `auto` picked."""
    require_engine()
    from paceline.decode.llm import LLM
    from paceline.decode.memory import parse_bytes
    from paceline.decode.verify.leniency import parse_leniency

    max_memory = parse_bytes(args.max_memory)
    llm = LLM(
        args.model,
        draft=args.draft or "auto",
        draft_length=args.draft_length,
        tree_size=args.tree_size,
        verify=args.verify,
        relaxed=None if args.relaxed is None else parse_leniency(args.relaxed),
        dtype=args.dtype,
        draft_dtype=args.draft_dtype,
        device=args.device,
        threads=args.threads,
        max_context=args.max_context,
        max_batch=max_batch,
        max_memory=max_memory,
        deterministic=args.deterministic,
        trace=args.trace,
        probe=args.probe,
        on_record=on_record,
        progress=show_progress,
    )
    dtype = llm.precision
    if sys.stderr.isatty():
        print("\r" + " " * 78 + "\r", end="", file=sys.stderr)
    picked = f"{dtype} on {llm.device}, loaded in {llm.load_s:.1f} s"
    say(f"{args.model}: {picked}; drafter: {llm.defaults.drafter}")
    say(str(llm.memory))
    if llm.defaults.verify == "relaxed":
        say("--verify relaxed is not exact: the text does not have the target's own distribution")
    for note in llm.notes:
        say(note)
    return llm


def require_engine() -> None:
    """Raise MissingExtra where the decoding wing's dependencies are not installed."""
    needed = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "jinja2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"decoding needs {', '.join(missing)}, not installed here; install them with "
            f"`pip install 'paceline[engine]'`. Planning works without."
        )


def speed_line(done: Completion) -> str:
    """One line on a finished answer: tokens, speed, AL."""
    stats = done.stats
    speed = stats.emitted / stats.decode_s if stats.decode_s else 0.0
    line = f"{len(done.token_ids)} tokens, {speed:.1f} tokens/s, first token after {stats.prefill_s:.2f} s"
    if stats.cached_tokens:
        line += f" ({stats.cached_tokens} tokens of the prompt were known)"
    if stats.acceptance_length is not None:
        line += f", AL {stats.acceptance_length:.2f} ({stats.accepted} of {stats.drafted} drafts accepted)"
        line += f", {abs(stats.saved_s):.1f} s {'saved' if stats.saved_s >= 0 else 'lost'} against plain decoding"
    return line if done.lossless else f"{line}; not exact ({done.verify})"


def numbers(name: str, text: str, low: float = 0.0, whole: bool = False) -> list[float]:
    """Numbers parted by commas, each from `low`, none twice. Raises InvalidParameter."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    wrong = not values or any(v < low or v != v or (whole and v != int(v)) for v in values)
    if wrong or len(set(values)) < len(values):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidParameter(name, text, f"{kind} from {low:g} parted by commas, each once")
    return values


def progress_bar(share: float, text: str) -> None:
    """A bar of the share that is done, which the next one overwrites; nothing where stderr is no terminal."""
    filled = round(24 * min(max(share, 0.0), 1.0))
    show_progress(f"[{'#' * filled}{'.' * (24 - filled)}] {100 * share:3.0f} %  {text}")


def end_progress() -> None:
    """Clear the line of `progress_bar`."""
    if sys.stderr.isatty():
        print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def _draft_length(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        value: Any = int(text)
    except ValueError:
        value = text
    if not isinstance(value, int) or value < 0:
        raise InvalidParameter("--draft-length", text, "a whole number from 0, or auto")
    return value
