"""What a start takes: from nothing to the first token, cold and warm, and the memory beside weights and cache.

    python bench/start.py [--model smollm2-135m ...] [--dtype bfloat16 int8 int4] [--rounds 5] [--threads 2]

A round starts two processes one after the other in a cache folder of their own, which has the fetched models and
nothing compiled: the first compiles (`cold`), the second finds that (`warm`). Time is that from before the process is
started to its first token, of a short prompt; the model's file is in the system's page cache after the first round.

Memory is resident memory above that of the same process with everything imported (PyTorch, Transformers' configs,
Paceline) and no model opened: its peak up to the first token, and what is left then. It is divided by the weights as
they lie in memory and the cache blocks of the prompt.

Printed: medians with the lowest and the highest. The last line is one JSON object. Exit code 1 where two starts say
something else, or where a model's process failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.decode.model.fetch import cache_folder
from paceline.decode.model.source import resolve_source

PROMPT, TOKENS = "The tide at the northern pier turns at", 8
STARTS = ("cold", "warm")


def main() -> int:
    args = arguments()
    if args.child is not None:
        print(json.dumps(first_token(args.model[0], args.dtype[0], args.threads, args.child)))
        return 0
    results: list[dict[str, Any]] = []
    print(
        "| model | dtype | cold, s | warm, s | of it loading, s | peak / (weights + cache) | left / (weights + cache) |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for model in args.model:
        resolve_source(model, say)  # fetched before any clock starts
        for dtype in args.dtype:
            rounds = [one_round(model, dtype, args.threads) for _ in range(args.rounds)]
            results.append({"model": model, "dtype": dtype, "rounds": rounds})
            print(row(model, dtype, rounds), flush=True)
    equal = all(len({tuple(start["tokens"]) for r in one["rounds"] for start in r.values()}) == 1 for one in results)
    print("texts equal over all starts" if equal else "texts DIFFER between starts")
    print(json.dumps({"results": results, "equal": equal}))
    return 0 if equal else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"], help="default: %(default)s")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8", "int4"], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when the process was started
    return parser.parse_args()


def one_round(model: str, dtype: str, threads: int) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for kept in cache_folder().iterdir() if cache_folder().is_dir() else ():
            if kept.name != "compiled":
                (Path(folder) / kept.name).symlink_to(kept)
        return {start: run_child(model, dtype, threads, folder) for start in STARTS}


def run_child(model: str, dtype: str, threads: int, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--dtype", dtype, "--threads", str(threads)]
    command += ["--child", repr(time.time())]
    environment = {**os.environ, "PACELINE_CACHE": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"start.py: {model} in {dtype} did not start: {done.stderr.strip()[-400:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def first_token(model: str, dtype: str, threads: int, started: float) -> dict[str, Any]:
    from transformers import AutoConfig

    from paceline import LLM, SamplingParams

    AutoConfig.for_model("llama")
    imported = resident("VmRSS")
    llm = LLM(model, dtype=dtype, threads=threads, max_batch=1, draft="none")
    prompt = llm.encode(PROMPT)
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    seconds = time.time() - started
    peak, left = resident("VmHWM") - imported, resident("VmRSS") - imported
    tokens = llm.generate([prompt], SamplingParams(max_tokens=TOKENS, temperature=0))[0].completions[0].token_ids
    held = llm.memory.weights + llm.engine.cache.cost(len(prompt) + 1)
    return {
        "seconds": seconds,
        "load_s": llm.load_s,
        "imported": imported,
        "held": held,
        "peak": peak / held,
        "left": left / held,
        "tokens": list(tokens),
        "notes": llm.notes,
    }


def resident(name: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def row(model: str, dtype: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    def spread(start: str, key: str) -> str:
        values = [r[start][key] for r in rounds]
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    cells = [spread("cold", "seconds"), *(spread("warm", key) for key in ("seconds", "load_s", "peak", "left"))]
    return f"| {Path(model).name} | {dtype} | {' | '.join(cells)} |"


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
