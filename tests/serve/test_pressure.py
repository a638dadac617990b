"""A cache too small for what is asked: choices yield to one another and come back, and nothing of it shows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers import Running, serving
from test_watching import scrape

from paceline import LLM

CLIENTS = 12


def body(number: int) -> dict[str, Any]:
    """A prompt that ends shortly before a block of the cache does, and an answer that crosses into the next."""
    return {
        "prompt": [3 + (number * 7 + i * i) % 40 for i in range(480 + number)],
        "max_tokens": 70,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "speculation": {"draft": "none"} if number % 3 == 0 else {"draft": "suffix", "draft_length": 1 + number % 5},
    }


def ask(server: Running, number: int) -> str:
    reply = server.post("/v1/completions", body(number))
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    return str(choice["text"])


def test_under_memory_pressure_every_answer_is_the_one_it_has_alone(folder: str, server: Running) -> None:
    """Memory for three blocks, four lanes: two choices that cross a block do not fit. Also seen while it happens."""
    alone = [ask(server, number) for number in range(CLIENTS)]
    plan = LLM(folder, dtype="float32", max_batch=4, draft="suffix", max_memory=1 << 40).memory
    assert plan.cache is not None and plan.sequences is not None
    block = plan.cache // plan.sequences // 2
    limit = plan.weights + plan.workspace + 3 * block + block // 2
    with serving(folder, max_memory=limit) as tight:
        seen: list[dict[str, Any]] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                seen.append(tight.http.get("/live").json())

        watching = threading.Thread(target=watch)
        watching.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            texts = list(pool.map(lambda number: ask(tight, number), range(CLIENTS)))
        ended.set()
        watching.join()
        assert texts == alone
        tight.wait_idle()
        told, last = scrape(tight), tight.http.get("/live").json()
        assert told["num_preemptions_total", ()] == last["minute"]["preempted"] > 0
        assert max(s["cache"] for s in seen) > 0.5 and max(s["waiting"] for s in seen) > 0
        assert last["cache"] == told["kv_cache_usage_ratio", ()] == 0
        assert told["request_success_total", ("length",)] == CLIENTS
