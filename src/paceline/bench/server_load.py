"""Blocks of prompts on any server that speaks OpenAI's chat completions, streamed, by the standard library alone.

A request's first token is its first chunk with content, its last the last one. Tokens are those of the `usage` the
server sends at the end of the stream; where it sends none, chunks are counted, and a chunk can hold several tokens.
Answers are compared as text. Nothing is said of rounds: a server does not tell.

Refused by name: an address that is not http or https, a server that answers with an error, a stream that ends early.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from paceline.bench.loads import BlockTimes, params_of
from paceline.bench.paired import Block, Sample
from paceline.bench.workloads import WorkloadPrompt
from paceline.errors import InvalidParameter, RequestFailed, UsageError

__all__ = ["ServerLoad", "parse_server"]

_TIMEOUT_S = 600.0


def parse_server(text: str) -> tuple[str, str]:
    """(arm, address) of `ADDRESS` or `NAME=ADDRESS`; without a name the arm is called by its host and port."""
    name, equals, address = text.partition("=")
    if not equals or "://" in name:
        name, address = "", text
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameter("--url", text, "http://HOST[:PORT][/PATH], or NAME= before it")
    return name or parts.netloc, address


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """An arm behind an address. `address` ends before `/chat/completions`: with or without `/v1`."""

    address: str
    model: str
    max_tokens: int
    api_key: str | None = None
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, block: Block) -> tuple[list[Sample], BlockTimes]:
        began = self.clock()
        with ThreadPoolExecutor(block.concurrency) as workers:
            samples = list(workers.map(lambda p: self._answer(p, block.temperature), block.prompts))
        return samples, BlockTimes(self.clock() - began, sum(s.tokens for s in samples))

    def _answer(self, prompt: WorkloadPrompt, temperature: float) -> Sample:
        params = params_of(prompt, temperature, self.max_tokens)
        body = {
            "model": self.model,
            "messages": prompt.messages,
            "temperature": temperature,
            "seed": params.seed,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = self.clock()
        times: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        reason = None
        for event in self._events(body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                content = choice.get("delta", {}).get("content")
                if content:
                    texts.append(content)
                    times.append(self.clock())
                reason = choice.get("finish_reason") or reason
        if reason is None or not times:
            raise RequestFailed(f"{self.address} ended the answer to prompt {prompt.id} without a text or a reason")
        return Sample(
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            token_ids=(),
            finish_reason=reason,
            first_s=times[0] - began,
            decode_s=times[-1] - times[0],
            text="".join(texts),
            counted=int(usage.get("completion_tokens", len(times))),
        )

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parts = urlsplit(self.address)
        connection = _connect(parts)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", _path(parts), json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(400).decode("utf-8", "replace")
                raise UsageError(f"{self.address} answered {response.status}: {said}")
            for line in response:
                data = line.decode("utf-8").strip()
                if data.startswith("data:") and data != "data: [DONE]":
                    yield json.loads(data.removeprefix("data:"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestFailed(f"{self.address} cannot be asked: {error}") from error
        finally:
            connection.close()


def _path(parts: SplitResult) -> str:
    path = parts.path.rstrip("/")
    return f"{path if path.endswith('/v1') else path + '/v1'}/chat/completions"


def _connect(parts: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
