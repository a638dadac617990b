"""Servers on loopback, over a model in a folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from paceline import LLM
from paceline.serve.metrics import Metrics
from paceline.serve.run import Server, open_socket
from paceline.serve.service import ServiceOptions

NAME = "tiny"


class Running:
    """A server in a thread, and ways to reach it."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url
        self.engine = server.service.llm.engine
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._client_http = httpx.Client(timeout=60, trust_env=False)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self._client_http
        )

    def close(self) -> None:
        self.http.close()
        self._client_http.close()

    def wait_idle(self, seconds: float = 10.0) -> None:
        until = time.perf_counter() + seconds
        while self.engine.has_work or self.server.service.thread.held:
            assert not self.server.service.thread.dead, "the engine failed"
            assert time.perf_counter() < until, "the engine does not come to rest"
            time.sleep(0.01)


@contextmanager
def serving(
    folder: str, *, grace_s: float = 5.0, max_batch: int = 4, max_memory: int | None = None, **options: Any
) -> Iterator[Running]:
    metrics = Metrics()
    llm = LLM(
        folder, dtype="float32", max_batch=max_batch, draft="suffix", draft_length=4, on_record=metrics.record,
        max_memory=max_memory,
    )  # fmt: skip
    server = Server(llm, metrics, ServiceOptions(NAME, **options), grace_s=grace_s)
    listener = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    running = Running(server, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        until = time.perf_counter() + 30
        while not server.started:
            assert thread.is_alive() and time.perf_counter() < until, "the server did not start"
            time.sleep(0.01)
        yield running
    finally:
        running.close()
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
