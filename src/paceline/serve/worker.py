"""The engine in a thread of its own, and the requests that pass between it and the event loop.

    event loop   admits, submits and cancels; reads each request's deltas
    engine       takes what lies in the inbox between two rounds, steps, hands the round's deltas back

Guarantees: a request that cannot run fails alone, before it starts; what a client left is cancelled before the
next round; no more than `capacity` choices are held, the running ones included. A reader that falls behind finds
its deltas merged, so that what waits for it is never more than its own answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from paceline.core.output import Delta
from paceline.decode.engine import Engine
from paceline.decode.sequence import Phase, Request, Sequence
from paceline.serve.errors import ApiError, as_api_error, queue_full, stopping
from paceline.serve.metrics import Metrics

__all__ = ["EngineThread", "Job", "Reply"]

_LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Job:
    """One request in the engine. `first` is the place of its first choice in the reply.

    sequences   the engine's, once it has taken the request
    left        choices that have not ended
    """

    request: Request
    reply: Reply
    first: int
    arrived: float
    opened: asyncio.Future[None]
    left: int
    sequences: list[Sequence] = field(default_factory=list)
    last_delta: dict[int, float] = field(default_factory=dict)


class Reply:
    """The requests behind one answer, read as one stream of deltas. Choices are numbered through."""

    def __init__(self, thread: EngineThread, requests: Seq[Request]) -> None:
        self._thread, self._news = thread, asyncio.Event()
        self._waiting: dict[int, Delta] = {}
        self._failure: ApiError | None = None
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        self.jobs: list[Job] = []
        first = 0
        for request in requests:
            self.jobs.append(Job(request, self, first, now, loop.create_future(), request.params.n))
            first += request.params.n
        self.choices = first

    async def open(self) -> None:
        """Wait until the engine has taken every request. Raises what it raised for the first that cannot run."""
        try:
            outcomes = await asyncio.gather(*(job.opened for job in self.jobs), return_exceptions=True)
        except BaseException:
            self.cancel()
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.cancel()
                raise outcome

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything new, choice by choice, until all have ended. Leaving early cancels the rest."""
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                if not self._waiting:
                    if not any(job.left for job in self.jobs):
                        return
                    self._news.clear()
                    await self._news.wait()
                    continue
                ready, self._waiting = self._waiting, {}
                for _, delta in sorted(ready.items()):
                    yield delta
        finally:
            self.cancel()

    def cancel(self) -> None:
        for job in self.jobs:
            if job.left:
                self._thread.cancel(job)

    def put(self, delta: Delta) -> None:
        """Take a delta, its choice already numbered through."""
        before = self._waiting.get(delta.choice)
        self._waiting[delta.choice] = delta if before is None else _join(before, delta)
        self._news.set()

    def fail(self, error: ApiError) -> None:
        self._failure = error
        self._news.set()


class EngineThread:
    """Runs `engine` until `stop`.

    capacity   choices held at most, running and waiting
    on_death   called on the event loop when the engine failed beyond one request; nothing is taken after it
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, capacity: int, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.engine, self.metrics, self.capacity = engine, metrics, capacity
        self.dead, self.draining = False, False
        self.held = 0  # choices admitted and not ended; event loop only
        self._on_death = on_death
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._jobs: dict[str, Job] = {}  # engine thread only
        self._queued: list[Job] = []  # engine thread only: taken, not yet scheduled
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # -- event loop --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: Seq[Request]) -> Reply:
        """Queue requests. Raises ApiError: 400 for more choices than could ever be held, 429 for a full queue,
        503 once stopping.
        """
        choices = sum(r.params.n for r in requests)
        if self.dead or self.draining:
            raise stopping()
        if choices > self.capacity:
            text = f"{choices} choices in one request; this server holds {self.capacity} at most"
            raise ApiError(400, text, param="n", code="too_many_choices")
        if self.held + choices > self.capacity:
            raise queue_full(self.metrics.retry_after_s())
        self.held += choices
        reply = Reply(self, requests)
        for job in reply.jobs:
            self._inbox.put(("add", job))
        return reply

    def cancel(self, job: Job) -> None:
        self._inbox.put(("cancel", job))

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; give what runs `grace_s` seconds, then end it with what it has."""
        self.draining = True
        until = time.perf_counter() + grace_s
        while self.held and time.perf_counter() < until:
            await asyncio.sleep(0.02)
        self._inbox.put(("cancel all", None))
        while self.held and not self.dead:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self.draining = True
        self._inbox.put(("stop", None))
        await asyncio.to_thread(self._thread.join)

    def _hand_out(self, deltas: Seq[tuple[Job, Delta]], now: float) -> None:
        for job, delta in deltas:
            self.metrics.delta(delta, now, job.arrived, job.last_delta.get(delta.choice))
            job.last_delta[delta.choice] = now
            if delta.finish_reason is not None:
                job.left -= 1
                self.held -= 1
                self.metrics.ended(job.sequences[delta.choice].stats)
            job.reply.put(replace(delta, choice=job.first + delta.choice) if job.first else delta)

    def _opened(self, job: Job, error: Exception | None) -> None:
        if error is not None:
            self.held -= job.left
            job.left = 0
        if not job.opened.done():
            if error is None:
                job.opened.set_result(None)
            else:
                job.opened.set_exception(error)

    def _died(self, jobs: Seq[Job]) -> None:
        self.dead = True
        error = ApiError(500, "the engine failed and the server is stopping", kind="server_error", code="engine_failed")
        for job in jobs:
            self._opened(job, error)
            self.held -= job.left
            job.left = 0
            job.reply.fail(error)
        self._on_death()

    # -- engine thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                if self.engine.has_work:
                    began = time.perf_counter()
                    deltas = self.engine.step()
                    self._deliver(deltas, began)
        except Exception:
            _LOG.exception("the engine failed")
            self._tell(self._died, self._orphans())

    def _take(self) -> bool:
        """Empty the inbox, waiting for something where nothing runs; False when told to stop."""
        while not self._inbox.empty() or not self.engine.has_work:
            order, job = self._inbox.get()
            if order == "stop":
                return False
            if order == "cancel all":
                for name in self._jobs:
                    self.engine.cancel(name)
            elif order == "cancel":
                assert job is not None
                self.engine.cancel(job.request.request_id)
            else:
                assert job is not None
                self._add(job)
        return True

    def _add(self, job: Job) -> None:
        try:
            job.sequences = self.engine.add(job.request)
        except Exception as error:
            if as_api_error(error).status >= 500:
                _LOG.exception("a request could not be added")
            self._tell(self._opened, job, error)
            return
        self._jobs[job.request.request_id] = job
        self._queued.append(job)
        self._tell(self._opened, job, None)

    def _deliver(self, deltas: Seq[Delta], began: float) -> None:
        now = time.perf_counter()
        for job in [j for j in self._queued if any(s.phase is not Phase.WAITING for s in j.sequences)]:
            self._queued.remove(job)
            self.metrics.queued(began - job.arrived)
        pairs = [(self._jobs[d.request_id], d) for d in deltas]
        for job in {id(j): j for j, _ in pairs}.values():
            if all(s.phase is Phase.FINISHED for s in job.sequences):
                del self._jobs[job.request.request_id]
        self.metrics.held(self.engine)
        if pairs:
            self._tell(self._hand_out, pairs, now)

    def _orphans(self) -> list[Job]:
        jobs = list(self._jobs.values())
        while not self._inbox.empty():
            order, job = self._inbox.get()
            if order == "add" and job is not None:
                jobs.append(job)
        return jobs

    def _tell(self, call: Callable[..., None], *values: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:
            _LOG.warning("the event loop has ended before the engine")


def _join(first: Delta, then: Delta) -> Delta:
    """Two deltas of one choice as one."""
    return Delta(
        then.request_id,
        then.choice,
        first.token_ids + then.token_ids,
        first.accepted + then.accepted,
        first.text + then.text,
        first.logprobs + then.logprobs,
        then.finish_reason,
        then.error,
    )
