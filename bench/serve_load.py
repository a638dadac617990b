"""A server under load and under faults: many clients, half of them leaving at random, and all free afterwards.

    python bench/serve_load.py --serve "MODEL [options of paceline serve]" [--clients 1,4,16,64] [--seconds 60]
        [--leave 0.5] [--kill] [--again 8] [--max-tokens 128] [--speculation '{"draft": "none"}'] [--output FILE]
    python bench/serve_load.py --url http://HOST:PORT [--foreign] ...

Each client asks for one chat answer after another, streamed, the package's own prompts in a fixed order over all
clients, a temperature of 0 or 0.8 by turns. (A prompt that comes again may be drafted from its earlier answer: raise
`--prompts` to have enough for all.) With `--leave P` a share P of the answers is left after a random number of chunks
(0 to 40), by closing the connection. Between the stages the server must come to rest: nothing running, waiting or held
in the cache within 10 s. Then `--again N` whole answers of the stage are asked for again, one at a time: the texts must
be the same, whatever was preempted (a server with a small `--max-memory` does so). A line a stage: answers, tokens a
second, time to first token and between deliveries by quantiles, refusals (429, waited for as told), failures,
preemptions, and the memory of the process before and after (where `--serve` started it). `--kill` ends the server with
SIGKILL in the middle of a last stage, starts it again on the same port, and asks it the first prompt again: the text
must be the same.

`--foreign` asks another server of the protocol: no field of ours, tokens by its `usage`, nothing read from its metrics.

The last line of stdout is JSON. Exit code 1 where anything failed, stuck or stayed held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from paceline.bench.own_prompts import OWN_KINDS, own_prompts

STUCK_S = 300.0
REST_S = 10.0


@dataclass(slots=True)
class Stage:
    """What `clients` clients saw in `seconds`, the last answers included."""

    clients: int
    seconds: float
    answers: int = 0
    left: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    preempted: int = 0
    asked_again: int = 0
    differ: int = 0
    rest_s: float | None = None
    memory_mb: float | None = None

    def line(self) -> dict[str, Any]:
        value = {k: v for k, v in asdict(self).items() if k not in ("first_s", "gaps_s", "failures", "texts")}
        value["tokens_per_s"] = self.tokens / self.seconds
        for name, times in (("first_s", self.first_s), ("gaps_s", self.gaps_s)):
            value |= {f"{name}_p{p}": quantile(times, p / 100) for p in (50, 95, 99)}
        return value | {"failed": len(self.failures), "failures": sorted(set(self.failures))[:5]}


def quantile(values: list[float], part: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else None


class Server:
    """The server asked: one that is there, or one of our own."""

    def __init__(self, url: str | None, command: str | None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        if url is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.url = url.rstrip("/")

    def start(self) -> None:
        if self._command is None:
            return
        port = self.url.rpartition(":")[2]
        words = [sys.executable, "-m", "paceline", "serve", *shlex.split(self._command), "--port", port]
        self.process = subprocess.Popen(words)
        until = time.monotonic() + 120
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(0.2)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(60)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def memory_mb(self) -> float | None:
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def metric(self, *names: str) -> float:
        """Metrics without labels, added up."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("paceline_"))
        return sum(float(found["paceline_" + name]) for name in names)

    def held(self) -> float:
        """Choices running and waiting, and the share of the cache in use, added up: 0 at rest."""
        return self.metric("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")

    def rest(self) -> float | None:
        """Seconds until nothing is held, None where it takes longer than REST_S."""
        began = time.monotonic()
        while time.monotonic() < began + REST_S:
            if self.held() == 0:
                return time.monotonic() - began
            time.sleep(0.05)
        return None


class Client:
    """One client: answers one after another until the time is up."""

    def __init__(
        self, server: Server, prompts: list[str], stage: Stage, args: argparse.Namespace, numbers: Iterator[int]
    ) -> None:
        self._url, self._prompts, self._stage, self._args = f"{server.url}/v1/chat/completions", prompts, stage, args
        self._numbers = numbers  # of requests, shared by all clients

    async def run(self, until: float) -> None:
        limits = httpx.Timeout(STUCK_S)
        async with httpx.AsyncClient(timeout=limits, trust_env=False) as client:
            while time.monotonic() < until:
                try:
                    await self._ask(client)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self._stage.failures.append(f"{type(error).__name__}: {error}"[:200])
                    await asyncio.sleep(0.1)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        number = next(self._numbers)
        chance = random.Random(number)
        leave_after = chance.randrange(41) if chance.random() < self._args.leave else None
        began = before = time.monotonic()
        async with client.stream("POST", self._url, json=self._body(number)) as answer:
            if answer.status_code == 429:
                self._stage.refused += 1
                await asyncio.sleep(float(answer.headers["retry-after"]))
                return
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:150]!r}")
            chunks, ended, text = 0, False, ""
            async for line in answer.aiter_lines():
                if leave_after is not None and chunks >= leave_after:
                    self._stage.left += 1
                    return
                ended = ended or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                said = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                text += said
                self._stage.tokens += self._tokens(chunk)
                if said:
                    now = time.monotonic()
                    (self._stage.first_s if before == began else self._stage.gaps_s).append(now - before)
                    before, chunks = now, chunks + 1
            if not ended:
                raise ValueError("the stream ended early")
            self._stage.answers += 1
            self._stage.texts[number] = text

    def _body(self, number: int) -> dict[str, Any]:
        body = body_of(number, self._prompts, self._args) | {"stream": True}
        if self._args.foreign:
            return body | {"stream_options": {"include_usage": True}}
        return body | {"speculation": json.loads(self._args.speculation) | {"tokens": True}}

    def _tokens(self, chunk: dict[str, Any]) -> int:
        if self._args.foreign:
            return int((chunk.get("usage") or {}).get("completion_tokens", 0))
        return sum(len(choice.get("tokens", ())) for choice in chunk["choices"])


def body_of(number: int, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompts[number * 7 % len(prompts)]}],
        "max_completion_tokens": args.max_tokens,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
    }


async def run_stage(
    server: Server, prompts: list[str], clients: int, args: argparse.Namespace, numbers: Iterator[int]
) -> Stage:
    stage = Stage(clients, args.seconds)
    before = 0.0 if args.foreign else await asyncio.to_thread(server.metric, "num_preemptions_total")
    began = time.monotonic()
    until = began + args.seconds
    await asyncio.gather(*(Client(server, prompts, stage, args, numbers).run(until) for _ in range(clients)))
    stage.seconds = time.monotonic() - began
    if args.foreign:
        return stage
    stage.rest_s = await asyncio.to_thread(server.rest)
    stage.memory_mb = server.memory_mb()
    stage.preempted = int(await asyncio.to_thread(server.metric, "num_preemptions_total") - before)
    for number, text in list(stage.texts.items())[: args.again]:
        stage.asked_again += 1
        stage.differ += await asyncio.to_thread(ask_once, server, body_of(number, prompts, args)) != text
    return stage


def ask_once(server: Server, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=STUCK_S, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


async def kill_and_restart(server: Server, prompts: list[str], args: argparse.Namespace) -> bool:
    """Whether a server killed under load comes back with the same text."""
    before = ask_once(server, body_of(0, prompts, args))
    stage, until = Stage(4, 5.0), time.monotonic() + 5
    load = asyncio.gather(*(Client(server, prompts, stage, args, count(1)).run(until) for _ in range(4)))
    await asyncio.sleep(2)
    server.stop(signal.SIGKILL)
    await load
    await asyncio.to_thread(server.start)
    return ask_once(server, body_of(0, prompts, args)) == before


def main() -> int:
    args = parse(sys.argv[1:])
    prompts = ["\n\n".join([text] * args.repeat) for kind in OWN_KINDS for _, text in own_prompts(kind, args.prompts)]
    server = Server(args.url, args.serve)
    server.start()
    lines, numbers = [], count(1)
    try:
        ask_once(server, body_of(0, prompts, args))
        first_memory = server.memory_mb()
        for clients in (int(n) for n in args.clients.split(",")):
            stage = asyncio.run(run_stage(server, prompts, clients, args, numbers))
            lines.append(stage.line())
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
        same = asyncio.run(kill_and_restart(server, prompts, args)) if args.kill else None
    finally:
        server.stop()
    code = None if server.process is None else server.process.returncode
    result = {"stages": lines, "memory_mb_first": first_memory, "same_after_kill": same, "exit_code": code}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    rested = args.foreign or all(line["rest_s"] is not None for line in lines)
    good = rested and not any(line["failed"] or line["differ"] for line in lines)
    return 0 if good and same in (None, True) and code in (None, 0) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--serve", metavar="MODEL [OPTIONS]")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leave", type=float, default=0.5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--foreign", action="store_true", help="another server of the protocol, at --url")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="whole answers of a stage asked for again")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each prompt N times over")
    parser.add_argument("--speculation", default="{}")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    if args.kill and args.serve is None:
        parser.error("--kill needs --serve: only a server of our own is killed")
    if args.foreign and (args.serve is not None or args.leave or args.again):
        parser.error("--foreign goes with --url and --leave 0, and without --again")
    return args


if __name__ == "__main__":
    sys.exit(main())
