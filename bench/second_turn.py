"""Time to the first token of a chat's second turn: cold, with the prefix of the first turn, and of the new part alone.

    python bench/second_turn.py [--model smollm2-135m] [--prefix 300 1000 2000] [--rounds 5]

For each prefix length a conversation is made whose first turn, with its answer, has about that many tokens. A round
runs, in a turning order: the second turn with nothing kept (`cold`), the first turn and then the second (`warm`), and
a prompt of just the tokens that `warm` had to compute (`new`), with nothing kept. Time is that from handing the
request over to its first token. The answers of `warm` and `cold` are compared token by token, and the tokens taken
from the first turn are counted by the engine. Reported: medians, and the median of warm / new within rounds.

The last line is one JSON object. Exit code 1 where an answer differs or nothing was re-used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline import LLM, PacelineError, SamplingParams
from paceline.bench.paired import arm_order
from paceline.errors import InvalidParameter

ARMS = ("cold", "warm", "new")
FACTS = "The tide at the northern pier turns at {} past the hour, and the keeper writes it down in a green book. "
QUESTION = "What colour is the book of the keeper, and when does the tide turn at the southern pier?"


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompts of a conversation: its first turn's, its second's."""

    first: list[int]
    second: list[int]


@dataclass(frozen=True, slots=True)
class Ran:
    """One answer: seconds to its first token, its tokens, prompt tokens taken from before."""

    seconds: float
    tokens: tuple[int, ...]
    cached: int


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        llm = LLM(args.model, draft="none", dtype=args.dtype, threads=args.threads, max_batch=1, progress=say)
        say(str(llm.memory))
        if not llm.engine.model.row_policy.chunk_rows:
            say("on this machine bits depend on how prompts are cut; whole chunks alone are re-used")
        results = [measure(llm, prefix, args) for prefix in args.prefix]
        for result in results:
            print(
                f"prefix {result['prefix']:>5}, new {result['new_tokens']:>4} tokens: "
                f"cold {result['cold_s'] * 1e3:7.1f} ms, "
                f"warm {result['warm_s'] * 1e3:6.1f} ms, new part alone {result['new_s'] * 1e3:6.1f} ms; "
                f"warm / new {result['warm_over_new']:.2f}, cold / warm {result['cold_over_warm']:.1f}; "
                f"{'equal' if result['equal'] else 'DIFFERENT'} texts"
            )
        failed = not all(r["equal"] and r["cached"] for r in results)
        print(json.dumps({"model": args.model, "rounds": args.rounds, "results": results, "failed": failed}))
        return int(failed)
    except PacelineError as error:
        print(f"second_turn.py: {error}", file=sys.stderr)
        return 2


def measure(llm: LLM, prefix: int, args: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    turn = conversation(llm, prefix, args.max_tokens)
    runs: dict[str, list[Ran]] = {arm: [] for arm in ARMS}
    known = warm(llm, turn, params).cached  # not counted: touches memory for the first time
    for index in range(args.rounds):
        for arm in arm_order(ARMS, 0, index):
            llm.engine.clear_prefix_cache()
            if arm == "warm":
                runs[arm].append(warm(llm, turn, params))
            else:
                runs[arm].append(answer(llm, turn.second if arm == "cold" else turn.second[known:], params))
    times = {arm: [ran.seconds for ran in runs[arm]] for arm in ARMS}
    paired = list(zip(*times.values(), strict=True))
    return {
        "prefix": len(turn.first) + args.max_tokens,
        "prompt": len(turn.second),
        "cached": known,
        "new_tokens": len(turn.second) - known,
        "equal": len({ran.tokens for arm in ("cold", "warm") for ran in runs[arm]}) == 1,
        "warm_over_new": statistics.median(w / n for _, w, n in paired),
        "cold_over_warm": statistics.median(c / w for c, w, _ in paired),
        "seconds": times,
    } | {f"{arm}_s": statistics.median(times[arm]) for arm in ARMS}


def conversation(llm: LLM, prefix: int, answered: int) -> Turn:
    """Two turns, the first of about `prefix` tokens with its answer, which the model gives."""
    assert llm.tokenizer is not None
    text, count = "", 0
    while not count or count < prefix - answered:
        text += FACTS.format(len(text) % 60)
        first = [{"role": "user", "content": text + QUESTION}]
        count = len(llm.tokenizer.encode_chat(first))
    reply = llm.chat(first, SamplingParams(max_tokens=answered, ignore_eos=True)).text
    then = [
        *first,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And who rows the boat there?"},
    ]
    llm.engine.clear_prefix_cache()
    return Turn(llm.tokenizer.encode_chat(first), llm.tokenizer.encode_chat(then))


def warm(llm: LLM, turn: Turn, params: SamplingParams) -> Ran:
    answer(llm, turn.first, params)
    return answer(llm, turn.second, params)


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> Ran:
    began = time.perf_counter()
    stream = llm.stream(prompt, params)
    seconds = 0.0
    for delta in stream:
        if delta.token_ids and not seconds:
            seconds = time.perf_counter() - began
    done = stream.output.completions[0]
    return Ran(seconds, tuple(done.token_ids), done.stats.cached_tokens)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefix", type=int, nargs="+", default=[300, 1000, 2000], help="tokens (300 1000 2000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer (24)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    for name in ("rounds", "max_tokens"):
        if getattr(args, name) < 1:
            raise InvalidParameter(name, getattr(args, name), "a whole number from 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
