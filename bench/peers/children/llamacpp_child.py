"""llama.cpp's own `llama-server` behind the protocol, timed by the server's clocks, without HTTP.

Greedy by one sampler (`top_k` 1), the cheapest it has; no prompt is kept between requests. The n-gram modes but
`ngram-simple` keep what they saw in earlier requests, so that a prompt asked again would be drafted from its last
answer (fault PL-10 of public engines): for them the server is started anew before every call, outside what is timed.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lines import answer, serve

START_S = 120.0
WIDTH = 16  # tokens of a pass that scores


def _simple(n: str = "12", m: str = "48") -> list[str]:
    return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", n, "--spec-ngram-simple-size-m", m]


def _map_k(n: str = "12", m: str = "48") -> list[str]:
    return ["--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", n, "--spec-ngram-map-k-size-m", m]


def _map_k4v(n: str = "12", m: str = "48") -> list[str]:
    return ["--spec-type", "ngram-map-k4v", "--spec-ngram-map-k4v-size-n", n, "--spec-ngram-map-k4v-size-m", m]


def _cache(n_max: str = "3") -> list[str]:
    return ["--spec-type", "ngram-cache", "--spec-draft-n-max", n_max]


def _mod(match: str = "24", low: str = "48", high: str = "64") -> list[str]:
    sizes = ["--spec-ngram-mod-n-match", match, "--spec-ngram-mod-n-min", low, "--spec-ngram-mod-n-max", high]
    return ["--spec-type", "ngram-mod", *sizes]


def _draft(n_max: str = "3", p_min: str = "0.0") -> list[str]:
    return ["--spec-type", "draft-simple", "--spec-draft-n-max", n_max, "--spec-draft-p-min", p_min]


MODES: dict[str, Callable[..., list[str]]] = {
    "plain": list,
    "ngram-simple": _simple,
    "ngram-map-k": _map_k,
    "ngram-map-k4v": _map_k4v,
    "ngram-cache": _cache,
    "ngram-mod": _mod,
    "draft": _draft,
}


REMEMBERS = ("ngram-map-k", "ngram-map-k4v", "ngram-cache", "ngram-mod")


class LlamaServer:
    """model, draft  GGUF files; env  the folder in which llama.cpp was built"""

    server: subprocess.Popen[bytes] | None = None

    def load(
        self,
        model: str,
        mode: str,
        draft: str | None,
        threads: int,
        stop_ids: list[int],
        context: int,
        streams: int,
        env: str,
        **_: Any,
    ) -> dict[str, Any]:
        kind, *numbers = mode.split("/")
        self.stop_ids, self.streams = set(stop_ids), streams
        size = ["-t", str(threads), "-tb", str(threads), "-c", str(context * streams), "-np", str(streams)]
        flags = [*MODES[kind](*numbers), *(["-md", draft] if kind == "draft" and draft else [])]
        quiet = ["--host", "127.0.0.1", "--cache-ram", "0", "--log-disable"]
        self.command = [str(Path(env) / "build" / "bin" / "llama-server"), "-m", model, *size, *flags, *quiet]
        self.fresh = kind in REMEMBERS
        self._start()
        return {"about": f"llama-server {' '.join(flags) or 'plain'}"}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        if self.fresh:
            self.close()
            self._start()
        began = time.perf_counter()
        with ThreadPoolExecutor(self.streams) as pool:
            answers = list(pool.map(lambda ids: self._one(ids, max_tokens), prompts))
        return {"answers": answers, "wall_s": time.perf_counter() - began}

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()

    def _start(self) -> None:
        self.port = _free_port()
        self.server = subprocess.Popen([*self.command, "--port", str(self.port)], stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.server.returncode} while it started")
            try:
                self._ask("GET", "/health")
                return
            except (OSError, RuntimeError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _one(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        body = {
            "prompt": ids,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        done = json.loads(self._ask("POST", "/completion", json.dumps(body)))
        times = done["timings"]
        tokens = [t for t in done["tokens"] if t not in self.stop_ids]
        return answer(tokens, times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3, times["predicted_n"])

    def _ask(self, method: str, path: str, body: str | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {text[:300]}")
        return text


class Scores:
    """Logits by llama.cpp's Python bindings over the same built library, in passes of `WIDTH` tokens."""

    def load(self, model: str, threads: int, context: int, env: str, **_: Any) -> dict[str, Any]:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(Path(env) / "build" / "bin")
        sys.path.insert(0, str(Path(env) / "bindings"))
        from llama_cpp import Llama

        size = {"n_ctx": context, "n_batch": WIDTH, "n_ubatch": WIDTH}
        count = {"n_threads": threads, "n_threads_batch": threads}
        self.llama: Any = Llama(model, logits_all=True, verbose=False, **size, **count)
        return {}

    def score(self, tokens: list[int], path: str) -> dict[str, Any]:
        import numpy as np

        self.llama.reset()
        self.llama.eval(tokens)
        np.save(path, self.llama.scores[: len(tokens)])
        return {}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    child, scores = LlamaServer(), Scores()
    try:
        serve({"load": child.load, "generate": child.generate, "load_scores": scores.load, "score": scores.score})
    finally:
        child.close()
