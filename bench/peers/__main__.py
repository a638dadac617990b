"""Paceline beside the engines people run on a CPU: the same prompts, the same weights, greedy, in turns.

    python -m bench.peers install [PEER ...] --envs FOLDER
    python -m bench.peers speed --envs FOLDER --model MODEL [--draft DRAFT] [--arms ENGINE:WEIGHTS:MODE[*STREAMS] ...]
    python -m bench.peers quality --envs FOLDER --model MODEL [--arms ENGINE:WEIGHTS ...]

Peers are llama.cpp, openvino (OpenVINO GenAI) and transformers. `install` makes each an environment of its own under
FOLDER; arms of a peer that is not there are left out, and named. `--draft` is a smaller model of the same vocabulary,
for the modes `draft` and `auto+draft`. Prompts are the eight of `cases/peer_prompts.py` in the shared folder (kind
`peers`) and workloads of `paceline bench`. Tables are Markdown on stdout, progress is on stderr.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.peers.arms import DEFAULT_ARMS, PACELINE, PLAIN, Arm, parse_arm
from bench.peers.envs import PEERS, TRANSFORMERS, Environment, environment_of, install
from bench.peers.picture import picture
from bench.peers.quality import compare, quality_table
from bench.peers.speed import LONG, Prompt, measure, report, start
from bench.peers.weights import ModelFiles
from paceline.bench.probe import processor_name
from paceline.bench.results import ResultFile
from paceline.bench.workloads import KINDS, load_workload, workloads_folder
from paceline.decode.model.checkpoint import CheckpointInfo, inspect_checkpoint
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import PacelineError, UsageError

EIGHT = "peers"
_TURN_END = 8  # tokens behind a user's words, at most


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return int(args.run(args))
    except PacelineError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return error.exit_code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    made = verbs.add_parser("install", help="make the peers' environments")
    made.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    made.add_argument("--jobs", type=int, default=2, help="compilers at once")
    made.set_defaults(run=run_install)
    speed = verbs.add_parser("speed", help="tokens a second, side by side")
    speed.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS))
    speed.add_argument(
        "--long", nargs="+", type=int, default=[], metavar="TOKENS", help="prompts of so many tokens in place of kinds"
    )
    speed.add_argument("--draft", help="a smaller model of the same vocabulary")
    speed.add_argument("--rounds", type=int, default=5)
    speed.add_argument("--max-tokens", type=int, default=128)
    speed.add_argument("--seconds", type=float, default=600.0, help="about so long, loading left out")
    speed.add_argument("--output", type=Path, help="results, one a line; a run that was cut off goes on there")
    speed.add_argument("--picture", type=Path, help="write the speeds as bars, an SVG file")
    speed.set_defaults(run=run_speed)
    quality = verbs.add_parser("quality", help="how far the weights are from float32")
    quality.add_argument("--arms", nargs="+", default=["paceline:bfloat16", "openvino:int8", "llama.cpp:file"])
    quality.add_argument("--longest", type=int, default=192, help="tokens of a text")
    quality.set_defaults(run=run_quality, draft=None, long=[])
    for verb in (made, speed, quality):
        verb.add_argument("--envs", type=Path, required=True, help="folder of the environments and of what is made")
    for verb in (speed, quality):
        verb.add_argument("--model", required=True, help="a .gguf file, a folder with safetensors, or a known name")
        verb.add_argument("--kinds", nargs="+", choices=[EIGHT, *KINDS], default=[EIGHT])
        verb.add_argument("--prompts", type=int, default=8, help="of each workload")
        verb.add_argument("--threads", type=int, default=2)
        verb.add_argument("--shared", type=Path, default=workloads_folder().parent, help="holds cases/ and workloads/")
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- verbs -----------------------------------------------------------------------------------------------------


def run_install(args: argparse.Namespace) -> int:
    failed = 0
    for peer in args.peers or PEERS:
        say(f"installing {peer}")
        try:
            print(f"{peer}: {_versions(install(args.envs, peer, args.jobs))}", flush=True)
        except PacelineError as error:
            failed += 1
            say(f"{peer} is not installed: {error}")
    return 1 if failed else 0


def run_speed(args: argparse.Namespace) -> int:
    arms, envs = available(args.envs, [parse_arm(text) for text in args.arms], args.draft)
    model = inspect_checkpoint(args.model)
    prompts = load_prompts(model, args)
    context = max(len(p.ids) for p in prompts) + args.max_tokens + 64
    output = args.output or args.envs / "results" / f"{Path(args.model).stem}.jsonl"
    with ResultFile(output, _description(args, arms, envs)) as results, ExitStack() as stack:
        requests = _requests(args, arms, envs, model.eos_token_ids, context)
        children = start(stack, requests, args.threads, args.envs / "logs")
        measured = measure(
            children,
            prompts,
            results,
            rounds=args.rounds,
            max_tokens=args.max_tokens,
            stop_ids=model.eos_token_ids,
            seconds=args.seconds,
            say=say,
        )
    print(_heading(args, envs, f"greedy, up to {args.max_tokens} tokens"))
    print(report(measured, arms))
    if args.picture is not None:
        title = f"{Path(args.model).stem}, {processor_name()}, {args.threads} threads"
        args.picture.write_text(picture(measured, arms, title), encoding="utf-8")
    return 0


def run_quality(args: argparse.Namespace) -> int:
    arms, envs = available(args.envs, [parse_arm(f"{text}:{PLAIN}") for text in args.arms], None)
    model = inspect_checkpoint(args.model)
    prompts = load_prompts(model, args)
    reference = Arm(TRANSFORMERS, "float32", PLAIN)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        logs = args.envs / "logs"
        requests = _requests(args, arms, envs, model.eos_token_ids, args.longest + 64)
        files = ModelFiles(args.model, args.envs / "models", say).path_for(TRANSFORMERS, "float32", None)
        own = {"model": files, "draft": None, "stop_ids": sorted(model.eos_token_ids)}
        base = start(stack, [(reference, Path(sys.executable), own)], args.threads, logs, "load_scores")[reference]
        children = start(stack, requests, args.threads, logs, "load_scores")
        found = compare(base, children, prompts, model.vocab_size, Path(folder), longest=args.longest, say=say)
    print(_heading(args, envs, f"texts of up to {args.longest} tokens of {', '.join(args.kinds)}"))
    print(quality_table(found))
    return 0


# -- what they share -------------------------------------------------------------------------------------------


def load_prompts(model: CheckpointInfo, args: argparse.Namespace) -> list[Prompt]:
    """The same ids for every engine, by the model's own chat template."""
    tokenizer = model.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UsageError(f"{args.model} has no chat template; the prompts are conversations.")
    if args.long:
        return [Prompt(LONG, f"{count} tokens", _long(tokenizer, count, args.shared)) for count in args.long]
    prompts = []
    for kind in args.kinds:
        for name, text in _texts(kind, args.prompts, args.shared):
            prompts.append(Prompt(kind, name, tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))))
    return prompts


def _long(tokenizer: TextTokenizer, count: int, shared: Path) -> tuple[int, ...]:
    """The questions of Spec-Bench one behind the other, cut in front of the end of the turn."""
    text, ids = "", list[int]()
    for prompt in itertools.cycle(load_workload("spec_bench", shared / "workloads", 64).prompts):
        text += prompt.text + "\n\n"
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(ids) >= count:
            return (*ids[: count - _TURN_END], *ids[-_TURN_END:])
    raise UsageError(f"there is no workload spec_bench in {shared}; name its folder with --shared.")


def _texts(kind: str, count: int, shared: Path) -> list[tuple[str, str]]:
    if kind != EIGHT:
        return [(p.id, p.text) for p in load_workload(kind, shared / "workloads", count).prompts]
    path = shared / "cases" / "peer_prompts.py"
    if not path.exists():
        raise UsageError(f"the prompts {path} are not there; name their folder with --shared.")
    return list(runpy.run_path(str(path))["PROMPTS"])


def available(folder: Path, arms: Sequence[Arm], draft: str | None) -> tuple[list[Arm], dict[str, Environment | None]]:
    """The arms that can run, and the environment of each of their engines (None for Paceline's own)."""
    envs: dict[str, Environment | None] = {PACELINE: None}
    kept = []
    for arm in arms:
        if arm.engine != PACELINE:
            envs[arm.engine] = environment_of(folder, arm.engine)
            if envs[arm.engine] is None:
                say(f"{arm} is left out: {arm.engine} is not installed in {folder}; see `install`")
                continue
        if arm.wants_draft and draft is None:
            raise UsageError(f"{arm} needs a draft model; name one with --draft.")
        kept.append(arm)
    if not kept:
        raise UsageError("no arm is left; install a peer, or name one of Paceline's arms.")
    if len(set(kept)) < len(kept):
        raise UsageError("an arm is named twice; name each once.")
    return kept, {arm.engine: envs[arm.engine] for arm in kept}


def _requests(
    args: argparse.Namespace,
    arms: Sequence[Arm],
    envs: dict[str, Environment | None],
    stop_ids: frozenset[int],
    context: int,
) -> list[tuple[Arm, Path, dict[str, Any]]]:
    """The interpreter of each arm, and what its child is asked to load; files are made here, before anything runs."""
    files = ModelFiles(args.model, args.envs / "models", say)
    draft = None if args.draft is None else ModelFiles(args.draft, args.envs / "models", say)
    made = []
    for arm in arms:
        env = envs[arm.engine]
        request = {
            "model": files.path_for(arm.engine, arm.weights, env),
            "draft": draft.path_for(arm.engine, arm.weights, env) if draft is not None and arm.wants_draft else None,
            "stop_ids": sorted(stop_ids),
            "context": context,
            "env": None if env is None else str(env.folder),
        }
        made.append((arm, Path(sys.executable) if env is None else env.python, request))
    return made


def _description(args: argparse.Namespace, arms: Sequence[Arm], envs: dict[str, Environment | None]) -> dict[str, Any]:
    """What results of one file must have in common."""
    return {
        "program": "peers",
        "model": Path(args.model).name,
        "draft": None if args.draft is None else Path(args.draft).name,
        "arms": [str(arm) for arm in arms],
        "kinds": args.kinds,
        "long": args.long,
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "processor": processor_name(),
        "versions": {name: env.versions for name, env in envs.items() if env is not None},
    }


def _heading(args: argparse.Namespace, envs: dict[str, Environment | None], what: str) -> str:
    versions = "; ".join(_versions(env) for env in envs.values() if env is not None)
    draft = "" if args.draft is None else f", draft {Path(args.draft).name}"
    return (
        f"{Path(args.model).name}{draft}, {what}, {args.threads} threads, "
        f"{processor_name()} ({platform.machine()}); {versions or 'no peer'}\n"
    )


def _versions(env: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in env.versions.items())


if __name__ == "__main__":
    sys.exit(main())
