"""Time to the first token of a chat's second turn over HTTP: with its first turn kept, and cold, the same prompt.

    python bench/chat_turns.py --serve "MODEL [options of paceline serve]" [--prefix 300 1000] [--rounds 7]

The server is started here with two keys, which are two tenants: neither finds the other's prefixes. A round makes a
conversation that none had before, whose first turn, with its answer, has about `--prefix` tokens. One key asks the
first turn; the second turn, with the first answer in the history, is then asked by that key (`warm`) and by the other
(`cold`), in a turning order. Time is that from sending the request to its first text; answers are streamed, greedy.

Reported: medians with the middle half, the median of cold / warm within rounds, and the `cached_tokens` of `usage`.
The last line is one JSON object. Exit code 1 where the two answers differ or `warm` took nothing over.
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

import httpx
from second_turn import FACTS, QUESTION
from serve_load import STUCK_S, Server

from paceline.bench.paired import arm_order
from paceline.errors import InvalidParameter, PacelineError

KEYS = {"warm": "key-of-one", "cold": "key-of-another"}
THEN = "And who rows the boat there?"


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: seconds to its first text, its text, tokens of its prompt, how many came from before."""

    seconds: float
    text: str
    prompt: int
    cached: int


def main() -> int:
    try:
        args = parse(sys.argv[1:])
    except PacelineError as error:
        print(f"chat_turns.py: {error}", file=sys.stderr)
        return error.exit_code
    server = Server(None, args.serve + "".join(f" --api-key {key}" for key in KEYS.values()))
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=STUCK_S, trust_env=False) as client:
            results = [measure(client, prefix, args) for prefix in args.prefix]
    finally:
        server.stop()
    for result in results:
        print(line(result))
    failed = not all(r["equal"] and min(r["warm_cached"]) for r in results)
    print(json.dumps({"serve": args.serve, "rounds": args.rounds, "results": results, "failed": failed}))
    return int(failed)


def measure(client: httpx.Client, prefix: int, args: argparse.Namespace) -> dict[str, Any]:
    a_round(client, -1, prefix, args.max_tokens)  # not counted: touches memory for the first time
    rounds = [a_round(client, number, prefix, args.max_tokens) for number in range(args.rounds)]
    arms = {arm: [one[arm] for one in rounds] for arm in ("first", *KEYS)}
    return {
        "prefix": prefix,
        "prompt": statistics.median(a.prompt for a in arms["warm"]),
        "equal": all(one["warm"].text == one["cold"].text for one in rounds),
        "cold_over_warm": statistics.median(one["cold"].seconds / one["warm"].seconds for one in rounds),
        "seconds": {arm: [a.seconds for a in answers] for arm, answers in arms.items()},
        "warm_cached": [a.cached for a in arms["warm"]],
        "cold_cached": [a.cached for a in arms["cold"]],
    }


def a_round(client: httpx.Client, number: int, prefix: int, max_tokens: int) -> dict[str, Answer]:
    """The first turn, then the second warm and cold."""
    turns = opening(client, number, prefix - max_tokens)
    first = ask(client, turns, "warm", max_tokens)
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": THEN}]
    second = {arm: ask(client, turns, arm, max_tokens) for arm in arm_order(list(KEYS), prefix, number)}
    return {"first": first} | second


def opening(client: httpx.Client, number: int, tokens: int) -> list[dict[str, str]]:
    """A first turn of at least `tokens` tokens, unlike that of every other number and size from its beginning."""
    text = f"Report {number} of {tokens}. "
    while True:
        turns = [{"role": "system", "content": text + "Be brief."}, {"role": "user", "content": QUESTION}]
        reply = client.post("/tokenize", json={"messages": turns}, headers=key("warm"))
        reply.raise_for_status()
        if reply.json()["count"] >= tokens:
            return turns
        text += FACTS.format(len(text) % 60)


def ask(client: httpx.Client, turns: list[dict[str, str]], arm: str, max_tokens: int) -> Answer:
    body = {"messages": turns, "max_completion_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    seconds, text, usage = 0.0, "", {}
    began = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body, headers=key(arm)) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"chat_turns.py: status {reply.status_code}: {reply.read()[:300]!r}")
        for row in reply.iter_lines():
            if not row.startswith("data: {"):
                continue
            chunk = json.loads(row[6:])
            said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if said and not text:
                seconds = time.perf_counter() - began
            text, usage = text + said, chunk["usage"] or usage
    return Answer(seconds, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def key(arm: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[arm]}"}


def line(result: dict[str, Any]) -> str:
    times = []
    for arm, seconds in result["seconds"].items():
        low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        times.append(f"{arm} {middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
    cached = (
        f"{min(result['warm_cached'])} to {max(result['warm_cached'])} of {result['prompt']:g} prompt tokens cached"
    )
    return (
        f"prefix {result['prefix']}: {', '.join(times)}; cold / warm {result['cold_over_warm']:.1f}; "
        f"{cached} warm, {max(result['cold_cached'])} cold; {'equal' if result['equal'] else 'DIFFERENT'} texts"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--serve", required=True, metavar="MODEL [OPTIONS]")
    parser.add_argument("--prefix", type=int, nargs="+", default=[300, 1000], help="tokens (300 1000)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer (24)")
    args = parser.parse_args(argv)
    for name in ("rounds", "max_tokens"):
        if getattr(args, name) < 1:
            raise InvalidParameter(f"--{name.replace('_', '-')}", getattr(args, name), "a whole number from 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
