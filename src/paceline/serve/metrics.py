"""What Prometheus scrapes, and what the live page draws: fed by the engine's records and each request's deltas.

Names follow the field's: `spec_decode_num_*_total` counters as in vLLM and llama.cpp, with drafted tokens by
position beside the accepted ones (without them deep positions look worse than they are where the draft length
varies). Inter-token latency is the gap between two deliveries divided by the tokens delivered, counted once a token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.core.output import DecodeStats, Delta
from paceline.core.records import StepRecord
from paceline.decode.engine import Engine
from paceline.serve.live import Live

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6)


class Metrics:
    """One server's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.live = Live()
        self._recent_s: deque[float] = deque(maxlen=64)
        self._round, self._preemptions = -1, 0
        self._children: dict[tuple[int, str | int], Counter] = {}
        self._drafting()
        self._requests()

    def _drafting(self) -> None:
        r, name = self.registry, "paceline_spec_decode_"
        by = ["drafter"]
        self._drafts = Counter(name + "num_drafts", "Rounds of a choice in which something was drafted", by, registry=r)
        self._drafted = Counter(name + "num_draft_tokens", "Draft tokens proposed, longest path", by, registry=r)
        self._accepted = Counter(name + "num_accepted_tokens", "Draft tokens kept and emitted", by, registry=r)
        self._drafted_at = Counter(
            name + "num_draft_tokens_per_pos", "Draft tokens proposed at a position", ["position"], registry=r
        )
        self._accepted_at = Counter(
            name + "num_accepted_tokens_per_pos", "Draft tokens kept at a position", ["position"], registry=r
        )
        self._length = Gauge(
            name + "acceptance_length", "Tokens a drafting round emits, own one included, last minute", registry=r
        )
        self._chosen = Gauge(name + "draft_length", "Mean draft length chosen, last minute", registry=r)
        self._length.set_function(lambda: self.live.recent().acceptance_length or math.nan)
        self._chosen.set_function(lambda: _number(self.live.recent().draft_length))
        self._saved = Gauge(
            name + "net_seconds_saved", "Seconds saved against plain decoding; below 0 where drafting lost", registry=r
        )
        self._useless = Gauge(name + "useless_draft", "1 for a drafter that does not pay here", by, registry=r)
        self._rounds = Counter("paceline_rounds", "Rounds of the engine, by kind", ["kind"], registry=r)
        self._parts = Counter("paceline_round_seconds", "Seconds of rounds, by part", ["part"], registry=r)

    def _requests(self) -> None:
        r = self.registry
        self._prompt = Counter("paceline_prompt_tokens", "Tokens of the prompts taken", registry=r)
        self._cached = Counter(
            "paceline_prefix_cache_hits", "Prompt tokens taken from earlier requests, of all choices", registry=r
        )
        self._preempted = Counter("paceline_num_preemptions", "Choices that yielded their memory", registry=r)
        self._generated = Counter("paceline_generation_tokens", "Tokens emitted", registry=r)
        self._lossy = Counter("paceline_lossy_tokens", "Tokens emitted under a rule that is not exact", registry=r)
        self._ended = Counter("paceline_request_success", "Choices ended, by reason", ["finished_reason"], registry=r)
        self._refused = Counter("paceline_request_refused", "Requests refused, by HTTP status", ["status"], registry=r)
        self._first = Histogram(
            "paceline_time_to_first_token_seconds", "From arrival to the first token", buckets=_SECONDS, registry=r
        )
        self._between = Histogram(
            "paceline_inter_token_latency_seconds",
            "Between deliveries, divided by the tokens delivered",
            buckets=_TOKEN_SECONDS,
            registry=r,
        )
        self._queue = Histogram(
            "paceline_request_queue_time_seconds", "From arrival to the first round", buckets=_SECONDS, registry=r
        )
        self._whole = Histogram(
            "paceline_e2e_request_latency_seconds", "From arrival to the last token", buckets=_SECONDS, registry=r
        )
        self._running = Gauge("paceline_num_requests_running", "Choices being decoded", registry=r)
        self._waiting = Gauge("paceline_num_requests_waiting", "Choices waiting for a slot", registry=r)
        self._usage = Gauge("paceline_kv_cache_usage_ratio", "Memory of the cache in use, 0 to 1", registry=r)

    def watch(self, drafters: Iterable[str], saved_s: Callable[[], float], useless: Callable[[], list[str]]) -> None:
        """Show the controller's books at every scrape: what was saved, and which of `drafters` are of no use."""
        self._saved.set_function(saved_s)
        for drafter in drafters:
            self._useless.labels(drafter).set_function(partial(_is_in, drafter, useless))

    # -- engine thread -----------------------------------------------------------------------------------------

    def record(self, record: StepRecord) -> None:
        """One choice in one round."""
        first = record.round != self._round
        self._round = record.round
        self.live.add(record, first)
        of = self._of
        if first:
            for part, seconds in (("draft", record.draft_s), ("verify", record.verify_s), ("other", record.other_s)):
                of(self._parts, part).inc(max(seconds, 0.0))
        of(self._rounds, record.kind).inc()
        self._generated.inc(record.emitted)
        if not record.lossless:
            self._lossy.inc(record.emitted)
        if record.kind != "verify":
            return
        of(self._drafts, record.drafter).inc()
        of(self._drafted, record.drafter).inc(record.proposed)
        of(self._accepted, record.drafter).inc(record.accepted)
        for position in range(record.proposed):
            of(self._drafted_at, position).inc()
        for position in range(record.accepted):
            of(self._accepted_at, position).inc()

    def _of(self, counter: Counter, label: str | int) -> Counter:
        """A counter under a label; looking one up in the registry takes longer than counting."""
        key = id(counter), label
        if key not in self._children:
            self._children[key] = counter.labels(str(label))
        return self._children[key]

    def queued(self, seconds: float) -> None:
        self._queue.observe(max(seconds, 0.0))

    def held(self, engine: Engine) -> None:
        """The engine's gauges, between two rounds."""
        running, waiting, usage = engine.running, engine.waiting, engine.cache_usage
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(usage)
        self._preempted.inc(engine.preemptions - self._preemptions)
        self._preemptions = engine.preemptions
        self.live.held(running, waiting, usage, engine.preemptions)

    # -- event loop --------------------------------------------------------------------------------------------

    def prompt(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def ended(self, stats: DecodeStats) -> None:
        """A choice has ended with these counters."""
        self._cached.inc(stats.cached_tokens)

    def delta(self, delta: Delta, now: float, arrived: float, before: float | None) -> None:
        """A delivery to a choice whose last one was at `before`, None for its first."""
        if delta.token_ids and before is None:
            self._first.observe(now - arrived)
            self.live.first_token(now - arrived)
        elif delta.token_ids and before is not None:
            gap = (now - before) / len(delta.token_ids)
            for _ in delta.token_ids:
                self._between.observe(gap)
        if delta.finish_reason is not None:
            self._ended.labels(delta.finish_reason).inc()
            self._whole.observe(now - arrived)
            self._recent_s.append(now - arrived)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def retry_after_s(self) -> int:
        """Whole seconds after which a place is likely free: what a request took lately, on average."""
        mean = sum(self._recent_s) / len(self._recent_s) if self._recent_s else 1.0
        return min(max(math.ceil(mean), 1), 60)

    def text(self) -> bytes:
        """The scrape."""
        return generate_latest(self.registry)


def _is_in(name: str, names: Callable[[], list[str]]) -> float:
    return float(name in names())


def _number(value: float | None) -> float:
    return math.nan if value is None else value
