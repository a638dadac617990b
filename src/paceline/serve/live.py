"""The last minutes, second by second, for the live page: written by the engine's thread, read by the event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.core.records import StepRecord

__all__ = ["Live", "Window"]

_KEPT_S = 300
_POSITIONS = 32


@dataclass(slots=True)
class Window:
    """Sums over some seconds; of `running`, `waiting` and `cache` (share of its memory in use) the most in a second."""

    tokens: int = 0
    prompt_rounds: int = 0
    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    decoded: int = 0
    emitted_in_drafts: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    cache: float = 0.0
    drafted_at: list[int] = field(default_factory=lambda: [0] * _POSITIONS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * _POSITIONS)

    def add(self, record: StepRecord, first_of_round: bool) -> None:
        self.tokens += record.emitted
        if first_of_round:
            self.rounds += 1
            self.draft_s += record.draft_s
            self.verify_s += record.verify_s
            self.other_s += record.other_s
        if record.kind == "prefill":
            self.prompt_rounds += 1
            return
        self.decoded += 1
        self.drafted += record.proposed
        self.accepted += record.accepted
        if record.proposed:
            self.drafts += 1
            self.emitted_in_drafts += record.emitted
        for position in range(min(record.proposed, _POSITIONS)):
            self.drafted_at[position] += 1
        for position in range(min(record.accepted, _POSITIONS)):
            self.accepted_at[position] += 1

    @property
    def acceptance_length(self) -> float | None:
        return self.emitted_in_drafts / self.drafts if self.drafts else None

    @property
    def draft_length(self) -> float | None:
        """Draft tokens a choice and decode round, rounds without a draft counted as 0."""
        return self.drafted / self.decoded if self.decoded else None


class Live:
    """Seconds in a ring. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seconds: deque[tuple[int, Window]] = deque(maxlen=_KEPT_S)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=256)
        self._running = self._waiting = self._preemptions = 0
        self._cache = 0.0
        self._tokens = 0

    def add(self, record: StepRecord, first_of_round: bool) -> None:
        with self._lock:
            self._tokens += record.emitted
            self._now().add(record, first_of_round)

    def held(self, running: int, waiting: int, cache: float, preemptions: int) -> None:
        """What the engine holds after a round; `preemptions` of all its rounds."""
        with self._lock:
            now = self._now()
            now.preempted += preemptions - self._preemptions
            self._running, self._waiting, self._cache, self._preemptions = running, waiting, cache, preemptions
            now.running, now.waiting = max(now.running, running), max(now.waiting, waiting)
            now.cache = max(now.cache, cache)

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_tokens.append((self._clock(), seconds))

    def recent(self, seconds: int = 60) -> Window:
        """The sum of the last `seconds`."""
        since = int(self._clock()) - seconds
        with self._lock:
            return _sum(w for t, w in self._seconds if t > since)

    def snapshot(self, seconds: int = 120) -> dict[str, Any]:
        """What the page draws: a point a second (idle ones left out), sums of the last minute, what runs now."""
        now = int(self._clock())
        recent = self.recent()
        with self._lock:
            kept = [(t, w) for t, w in self._seconds if now - seconds < t < now]
            waits = sorted(s for t, s in self._first_tokens if t > now - 60)
            running, waiting, tokens, cache = self._running, self._waiting, self._tokens, self._cache
        return {
            "now": now,
            "running": running,
            "waiting": waiting,
            "cache": cache,
            "tokens_total": tokens,
            "seconds": [_point(t, w) for t, w in kept],
            "minute": {
                "acceptance_length": recent.acceptance_length,
                "draft_length": recent.draft_length,
                "drafted_at": _trim(recent.drafted_at),
                "accepted_at": recent.accepted_at[: len(_trim(recent.drafted_at))],
                "parts": {"draft": recent.draft_s, "verify": recent.verify_s, "other": recent.other_s},
                "preempted": recent.preempted,
                "first_token_p50_s": waits[len(waits) // 2] if waits else None,
            },
        }

    def _now(self) -> Window:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Window()))
        return self._seconds[-1][1]


def _point(second: int, window: Window) -> dict[str, Any]:
    return {
        "t": second,
        "tokens": window.tokens,
        "acceptance_length": window.acceptance_length,
        "draft_length": window.draft_length,
        "running": window.running,
        "waiting": window.waiting,
        "draft_s": window.draft_s,
        "verify_s": window.verify_s,
        "other_s": window.other_s,
    }


def _sum(windows: Iterable[Window]) -> Window:
    total = Window()
    for window in windows:
        for name in Window.__slots__:
            ours, theirs = getattr(total, name), getattr(window, name)
            together = [a + b for a, b in zip(ours, theirs, strict=True)] if isinstance(ours, list) else ours + theirs
            setattr(total, name, together)
    return total


def _trim(counts: list[int]) -> list[int]:
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
