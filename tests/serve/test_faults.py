"""Clients that leave, queues that fill, logits that are not numbers, engines that give out, servers that stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from servers import Running, serving

LONG: dict[str, Any] = {"prompt": "the cat", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
BAD_TOKEN = 370


@pytest.fixture(scope="module")
def narrow(folder: str) -> Iterator[Running]:
    with serving(folder, max_batch=1, max_queue=1) as running:
        yield running


class Model:
    """The served model, with something wrong on demand; slow, so that requests meet."""

    def __init__(self, inner: Any, delay_s: float = 0.0) -> None:
        self._inner, self.delay_s, self.broken = inner, delay_s, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, step: Any, cache: Any, taps: Any = ()) -> Any:
        if self.broken:
            raise RuntimeError("out of order")
        time.sleep(self.delay_s)
        result = self._inner.forward(step, cache, taps)
        rows = step.token_ids if step.wanted is None else step.token_ids[step.wanted]
        with torch.inference_mode():
            result.logits[rows == BAD_TOKEN] = torch.nan
        return result


@pytest.fixture
def slow(narrow: Running) -> Iterator[Running]:
    inner = narrow.engine.model
    narrow.engine.model = Model(inner, delay_s=0.005)  # type: ignore[assignment]
    yield narrow
    narrow.engine.model = inner
    narrow.wait_idle()
    narrow.engine.check()


def wait_for(condition: Any) -> None:
    until = time.perf_counter() + 10
    while not condition():
        assert time.perf_counter() < until, "it never came to be"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("waiting", [False, True], ids=["running", "queued"])
def test_a_client_that_leaves_is_cancelled(slow: Running, stream: bool, waiting: bool) -> None:
    """Its socket is closed while it runs, or while it waits behind another; the other goes on."""
    other = None
    if waiting:
        plain = LONG | {"max_tokens": 150, "speculation": {"draft": "none"}}
        other = threading.Thread(target=lambda: slow.post("/v1/completions", plain))
        other.start()
        wait_for(lambda: slow.engine.running == 1)
    body = httpx.Request("POST", f"{slow.url}/v1/completions", json=LONG | {"stream": stream}).content
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_for(lambda: slow.engine.waiting == 1 if waiting else slow.engine.running == 1)
        time.sleep(0.02)
    wait_for(lambda: slow.engine.waiting == 0 if waiting else not slow.engine.has_work)
    if other is not None:
        assert slow.engine.running == 1, "the one that stayed"
        other.join(30)


def test_a_full_queue_says_when_to_come_back(slow: Running) -> None:
    with slow.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        second = threading.Thread(target=lambda: slow.post("/v1/completions", LONG | {"max_tokens": 1}))
        second.start()
        wait_for(lambda: slow.server.service.thread.held == 2)
        refused = slow.post("/v1/completions", LONG)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        never = slow.post("/v1/completions", LONG | {"n": 3})
        assert never.status_code == 400 and never.json()["error"]["code"] == "too_many_choices"
    second.join(30)
    assert slow.post("/v1/completions", LONG | {"max_tokens": 1}).status_code == 200


def test_a_reader_that_stands_still_holds_no_slot(slow: Running) -> None:
    """Nothing of a stream is read until the answer is over in the engine; it is whole all the same."""
    body = LONG | {"max_tokens": 300, "stream": True}
    with slow.http.stream("POST", "/v1/completions", json=body) as answer:
        wait_for(lambda: slow.engine.has_work)
        wait_for(lambda: not slow.engine.has_work)
        assert answer.read().decode().rstrip().endswith("data: [DONE]")


def test_logits_that_are_no_numbers_fail_one_request(slow: Running) -> None:
    slow.engine.model.delay_s = 0  # type: ignore[union-attr]
    good = slow.post("/v1/completions", LONG | {"max_tokens": 9}).json()["choices"][0]["text"]
    bad = {"prompt": [5, BAD_TOKEN], "max_tokens": 9}
    whole = slow.post("/v1/completions", bad)
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_failed"
    lines = slow.post("/v1/completions", bad | {"stream": True}).text.split("\n\n")
    assert '"request_failed"' in lines[-3] and lines[-2] == "data: [DONE]"
    assert slow.post("/v1/completions", LONG | {"max_tokens": 9}).json()["choices"][0]["text"] == good


def test_an_engine_that_gives_out_ends_the_server(folder: str) -> None:
    with serving(folder, max_batch=1) as running:
        model = Model(running.engine.model, delay_s=0.01)
        running.engine.model = model  # type: ignore[assignment]
        with running.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            model.broken = True
            rest = list(lines)
            assert any("engine_failed" in line for line in rest), rest
        assert running.server.failed and running.server.should_exit


def test_stopping_lets_answers_end_or_gives_what_there_is(folder: str) -> None:
    for grace_s, reason in ((20.0, "length"), (0.0, "cancelled")):
        with serving(folder, grace_s=grace_s, max_batch=1) as running:
            running.engine.model = Model(running.engine.model, delay_s=0.005)  # type: ignore[assignment]
            body = LONG | {"max_tokens": 60, "stream": True}
            with running.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                running.server.should_exit = True
                wait_for(lambda: running.server.service.thread.draining)
                rest = [line for line in lines if line.startswith("data: {")]
            assert f'"finish_reason":"{reason}"' in rest[-1]
            running.wait_idle()


def test_the_command_serves_and_stops(folder: str) -> None:
    command = [sys.executable, "-m", "paceline", "serve", folder, "--port", "0", "--draft", "none", "--grace", "0.5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("serving "))
        url = line.split(" at ")[1].split()[0].removesuffix("/v1")
        assert url.startswith("http://127.0.0.1:")
        wait_for(lambda: _answers(url))
        body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30)
        assert answer.json()["model"] == folder and answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.ConnectError:
        return False
