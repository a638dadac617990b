"""Metrics that parse and add up, the live page and its data, health, and API keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Running, serving

from paceline.core.records import StepRecord
from paceline.serve.live import Live
from paceline.serve.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
CHAT = {
    "messages": [{"role": "user", "content": "the quick brown"}],
    "max_tokens": 50,
    "temperature": 0,
    "ignore_eos": True,
    "speculation": {"draft": "suffix", "draft_length": 4},
}


def scrape(server: Running) -> dict[tuple[str, tuple[str, ...]], float]:
    text = server.http.get("/metrics").text
    return {
        (sample.name.removeprefix("paceline_"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_are_what_the_answers_say(server: Running) -> None:
    before = scrape(server)
    usages = [server.post("/v1/chat/completions", CHAT | {"n": n}).json()["usage"] for n in (1, 3)]
    server.wait_idle()
    after = scrape(server)

    def grown(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0.0)

    told = [u["speculation"] for u in usages]
    for name, field in (
        ("spec_decode_num_drafts_total", "draft_rounds"),
        ("spec_decode_num_draft_tokens_total", "drafted"),
        ("spec_decode_num_accepted_tokens_total", "accepted"),
    ):
        assert grown(name, "suffix") == sum(t[field] for t in told) > 0
    at = [grown("spec_decode_num_draft_tokens_per_pos_total", str(i)) for i in range(4)]
    kept = [grown("spec_decode_num_accepted_tokens_per_pos_total", str(i)) for i in range(4)]
    assert sum(at) == grown("spec_decode_num_draft_tokens_total", "suffix") and sorted(at, reverse=True) == at
    assert sum(kept) == grown("spec_decode_num_accepted_tokens_total", "suffix")
    assert all(k <= d for k, d in zip(kept, at, strict=True))
    assert grown("generation_tokens_total") == 200 and grown("request_success_total", "length") == 4
    assert grown("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 4
    assert grown("request_queue_time_seconds_count") == 2, "one a request"
    assert grown("inter_token_latency_seconds_count") == 196, "one a token, several tokens a delivery or not"
    assert after["num_requests_running", ()] == after["num_requests_waiting", ()] == 0
    assert after["kv_cache_usage_ratio", ()] == 0
    assert 1 <= after["spec_decode_acceptance_length", ()] <= 5
    saved = sum(t["seconds_saved"] for t in told)
    assert saved != 0 and after["spec_decode_net_seconds_saved", ()] == server.server.service.llm.saved_s != 0
    assert {after["spec_decode_useless_draft", (name,)] for name in ("ngram", "suffix")} <= {0, 1}


def test_names_stand_in_the_document_and_the_dashboard(server: Running) -> None:
    server.post("/v1/chat/completions", CHAT)
    server.http.get("/nowhere")
    exported = {name for name, _ in scrape(server)}
    for path in (ROOT / "docs/server.md", ROOT / "docs/grafana.json"):
        named = set(re.findall(r"paceline_([a-z0-9_]+)", path.read_text(encoding="utf-8")))
        unknown = {n for n in named if not any(e == n or e.startswith(n) for e in exported)}
        assert named and not unknown, (path, unknown)


def test_the_page_asks_nobody_else(server: Running) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "__STYLE__" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    urls = set(re.findall(r"https?://[^\"' ]+", page.text))
    assert urls == {"http://www.w3.org/2000/svg"}, "a name of a language, not an address"
    for asset in re.findall(r"(?:src|href)=\"([^\"]*)\"", page.text):
        assert asset.startswith("data:")


def test_live_says_what_ran(server: Running) -> None:
    before = server.http.get("/live").json()["tokens_total"]
    server.post("/v1/chat/completions", CHAT)
    told = server.http.get("/live").json()
    assert told["tokens_total"] - before == 50
    assert told["saved_s"] == server.server.service.llm.saved_s and isinstance(told["alarms"], list)
    assert {"model", "drafter", "drafters", "running", "waiting", "seconds", "minute", "now"} <= told.keys()
    minute = told["minute"]
    assert len(minute["drafted_at"]) == len(minute["accepted_at"]) > 0 and minute["first_token_p50_s"] > 0


def record(second: float, kind: str, proposed: int, accepted: int) -> StepRecord:
    return StepRecord(
        request="r", choice=0, round=int(second), time_s=second, batch=1, rows=1, context=9, kind=kind,
        drafter="suffix", proposed=proposed, accepted=accepted, emitted=accepted + 1, draft_s=0.1, verify_s=0.2,
        other_s=0.0,
    )  # fmt: skip


def test_the_last_minutes_second_by_second() -> None:
    now = 1000.0
    live = Live(lambda: now)
    for second in range(400):
        now = 1000.0 + second
        live.add(record(now, "verify", 4, second % 3), True)
        live.add(record(now, "plain", 0, 0), False)
    now += 1
    told = live.snapshot(120)
    assert [p["t"] for p in told["seconds"]] == list(range(1281, 1400))
    assert all(p["tokens"] == 2 + (p["t"] - 1000) % 3 and p["draft_length"] == 2 for p in told["seconds"])
    assert told["minute"]["drafted_at"] == [59] * 4 and told["minute"]["accepted_at"][2:] == [0, 0]
    assert told["minute"]["acceptance_length"] == pytest.approx(2, abs=0.05)
    assert told["minute"]["parts"]["verify"] == pytest.approx(0.2 * 59), "a round's time once, whoever was in it"
    assert len(live._seconds) <= 300


def test_retry_after_follows_what_requests_take() -> None:
    from paceline.core.output import Delta

    metrics = Metrics()
    assert metrics.retry_after_s() == 1
    for _ in range(70):
        metrics.delta(Delta("r", 0, finish_reason="stop"), now=107.4, arrived=100.0, before=None)
    assert metrics.retry_after_s() == 8


@pytest.fixture(scope="module")
def locked(folder: str) -> Iterator[Running]:
    with serving(folder, keys={"key-a": "a", "key-b": "b"}) as running:
        yield running


def test_keys_are_asked_for(locked: Running) -> None:
    for path in ("/v1/models", "/metrics", "/live", "/openapi.json", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer key-c"}, {"Authorization": "key-a"}, {"Authorization": "Bearer"}):
            response = locked.http.get(path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    raw = httpx.Headers({b"Authorization": b"Bearer \xff\xfe"})
    assert locked.http.get("/v1/models", headers=raw).status_code == 401
    assert locked.http.get("/health").status_code == locked.http.get("/").status_code == 200
    assert [m.id for m in locked.client("key-b").models.list()] == ["tiny"]


def test_a_second_turn_takes_the_first_over_within_a_tenant(locked: Running) -> None:
    """And its text is that of a cold start."""
    turns = [{"role": "user", "content": "the quick brown fox " * 90}]
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}

    def ask(key: str) -> tuple[str, int, int]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = locked.http.post("/v1/chat/completions", json=body | {"messages": turns}, headers=headers).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    said, length, cached = ask("key-a")
    assert length > 512 and cached == 0
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    warm, longer, again = ask("key-a")
    cold, _, other = ask("key-b")
    assert warm == cold and other == 0, "another tenant starts from nothing"
    assert 512 <= again < longer


def test_drafters_learn_within_a_tenant(locked: Running) -> None:
    """The second answer of tenant a is drafted from its first; tenant b's first is not."""

    def drafted(key: str) -> int:
        body = CHAT | {"temperature": 1.5, "seed": 4, "max_tokens": 60}
        answer = locked.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return int(answer.json()["usage"]["speculation"]["accepted"])

    first, again, other = drafted("key-a"), drafted("key-a"), drafted("key-b")
    assert again > first and other == first
