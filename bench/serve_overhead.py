"""What the server itself costs a token: everything around an engine whose rounds take a given time, or none.

    python bench/serve_overhead.py [--streams 1,16] [--tokens-a-round 1,3] [--round-ms 0] [--seconds 4] [--profile]

The engine is a stand-in: a round gives every running choice its tokens, text and records, after `--round-ms` of sleep
in which, as in a compiled pass, other threads run. Service, thread, metrics, writers, HTTP and server-sent events are
the real ones, in a process of their own; clients read raw chunks of chat answers of 1,000 tokens in this one.

A line a setting: tokens a second, rounds a second against those of the engine alone, and the processor time of the
server's process a token and a round. `--profile` prints where the event loop's time goes (cProfile, slower by itself).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.core.output import Delta
from paceline.core.records import StepRecord
from paceline.decode.sequence import DraftSettings, Phase, Request
from paceline.serve.metrics import Metrics
from paceline.serve.run import Server, open_socket
from paceline.serve.service import ServiceOptions

ANSWER_TOKENS = 1000
_BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "max_completion_tokens": ANSWER_TOKENS,
    "stream": True,
}


@dataclass(eq=False)
class Running:
    """A choice of the stand-in, with what the server reads of the engine's own."""

    request: Request
    stats: Any
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)


class InstantEngine:
    """Rounds of `tokens` tokens a choice that take `round_s`."""

    def __init__(self, tokens: int, round_s: float, on_record: Callable[[StepRecord], None], most: int) -> None:
        self._tokens, self._round_s, self._on_record = tokens, round_s, on_record
        self.options = SimpleNamespace(max_batch=most)
        self.drafters = SimpleNamespace(drafters={"suffix": None})
        self._held: list[Running] = []
        self._rounds = count()
        self.waiting, self.cache_usage, self.preemptions = 0, 0.5, 0

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    @property
    def running(self) -> int:
        return len(self._held)

    def add(self, request: Request) -> list[Running]:
        stats = SimpleNamespace(
            draft_rounds=0, emitted_in_draft_rounds=0, cached_tokens=0, rounds=0, drafted=0, accepted=0, saved_s=0.0
        )
        self._held.append(Running(request, stats))
        return [self._held[-1]]

    def cancel(self, request_id: str) -> None:
        for choice in self._held:
            if choice.request.request_id == request_id:
                choice.phase = Phase.FINISHED

    def step(self) -> list[Delta]:
        if self._round_s:
            time.sleep(self._round_s)
        number = next(self._rounds)
        deltas = [self._emit(choice) for choice in self._held]
        for choice in self._held:
            self._record(choice, number)
        self._held = [c for c in self._held if c.phase is not Phase.FINISHED]
        return deltas

    def _emit(self, choice: Running) -> Delta:
        choice.output += [7] * self._tokens
        limit = choice.request.params.max_tokens or ANSWER_TOKENS
        cancelled, ended = choice.phase is Phase.FINISHED, len(choice.output) >= limit
        choice.phase = Phase.FINISHED if cancelled or ended else Phase.DECODE
        reason: Any = "cancelled" if cancelled else "length" if ended else None
        flags = (True,) * (self._tokens - 1) + (False,)
        return Delta(choice.request.request_id, 0, (7,) * self._tokens, flags, " word" * self._tokens, (), reason)

    def _record(self, choice: Running, number: int) -> None:
        drafts = self._tokens - 1
        self._on_record(
            StepRecord(
                request=choice.request.request_id, choice=0, round=number, time_s=0.0, batch=len(self._held),
                rows=self._tokens, context=9, kind="verify" if drafts else "plain", drafter="suffix",
                proposed=drafts, accepted=drafts, emitted=self._tokens, draft_s=0.0, verify_s=self._round_s,
                other_s=0.0,
            )
        )  # fmt: skip


def serve(args: argparse.Namespace) -> None:
    """The server's process: its port on stdout, then until its standard input ends."""
    metrics = Metrics()
    engine = InstantEngine(args.tokens, args.round_ms / 1000, metrics.record, 64)
    tokenizer = SimpleNamespace(
        token_bytes=lambda: {7: b" word"}, special_ids=frozenset(), chat_templates={},
        encode_chat=lambda *_, **__: [1, 2, 3],
    )  # fmt: skip
    llm: Any = SimpleNamespace(
        engine=engine, tokenizer=tokenizer, draft_set=SimpleNamespace(auto=None), defaults=DraftSettings(), alarms=[],
        max_context=4096, saved_s=0.0, resolve=lambda params: params, close=lambda: None,
    )  # fmt: skip
    server = Server(llm, metrics, ServiceOptions("instant"), grace_s=1)
    listener = open_socket("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)

    def until_told() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=until_told, daemon=True).start()
    if not args.profile:
        server.serve_on(listener)
        return
    profile = cProfile.Profile()
    profile.runcall(server.serve_on, listener)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)


async def read_answers(port: int, until: float, counts: list[int]) -> None:
    """One stream after another, on one connection each; chunks with text are counted."""
    body = json.dumps(_BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        held = b""
        while time.perf_counter() < until and (piece := await reader.read(1 << 16)):
            counts[0] += piece.count(b" word")
            counts[1] += piece.count(b"data: ")
            held = (held + piece)[-64:]
            if b"[DONE]" in held:
                break
        writer.close()


def measure(streams: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--serve", "--tokens", str(tokens), "--round-ms", str(args.round_ms)]
    options += ["--profile"] if args.profile else []
    process = subprocess.Popen(
        [sys.executable, __file__, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    port, counts = int(process.stdout.readline()), [0, 0]
    wait_for(port)

    async def load(seconds: float) -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(read_answers(port, until, counts) for _ in range(streams)))

    asyncio.run(load(1.0))
    counts[:] = [0, 0]
    used, began = cpu_s(process.pid), time.perf_counter()
    asyncio.run(load(args.seconds))
    seconds, used = time.perf_counter() - began, cpu_s(process.pid) - used
    process.stdin.close()
    process.wait(30)
    rounds = counts[0] / tokens / streams
    return {
        "streams": streams, "tokens_a_round": tokens, "tokens_per_s": counts[0] / seconds,
        "chunks_per_s": counts[1] / seconds, "rounds_per_s": rounds / seconds, "cpu_us_a_token": used / counts[0] * 1e6,
        "cpu_us_a_round": used / rounds * 1e6, "cpu_share": used / seconds,
    }  # fmt: skip


def wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--tokens-a-round", default="1,3")
    parser.add_argument("--round-ms", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    lines = []
    for tokens in (int(n) for n in args.tokens_a_round.split(",")):
        for streams in (int(n) for n in args.streams.split(",")):
            lines.append(measure(streams, tokens, args))
            print(json.dumps({k: round(v, 2) for k, v in lines[-1].items()}), file=sys.stderr)
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
