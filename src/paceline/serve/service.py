"""One server: the model, the engine's thread, its counters, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.output import Delta
from paceline.core.sampling import SamplingParams
from paceline.decode.llm import LLM
from paceline.decode.sequence import DraftSettings, Request
from paceline.decode.verify.rules import get_rule
from paceline.errors import RequestFailed, UsageError
from paceline.serve.errors import ApiError
from paceline.serve.metrics import Metrics
from paceline.serve.protocol import StreamOptions
from paceline.serve.replies import Choice, Echo, TokenTexts, Writer
from paceline.serve.tools import writes_tool_calls
from paceline.serve.worker import EngineThread, Reply

__all__ = ["Answer", "Service", "ServiceOptions", "as_json"]

as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """name             what the model is called in requests and answers
    max_queue        choices that may wait beside those that run
    max_body_bytes   of a request
    keys             API key -> tenant; empty lets everybody in
    """

    name: str
    max_queue: int = 64
    max_body_bytes: int = 8 * 2**20
    keys: Mapping[str, str] = field(default_factory=dict)


class Service:
    """`metrics` is the one that `llm` reports its records to. `on_death` is called when the engine has failed."""

    def __init__(
        self, llm: LLM, metrics: Metrics, options: ServiceOptions, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.llm, self.metrics, self.options = llm, metrics, options
        capacity = llm.engine.options.max_batch + options.max_queue
        self.thread = EngineThread(llm.engine, metrics, capacity, on_death)
        self.texts = TokenTexts(llm.tokenizer)
        self.created = int(time.time())
        self.drafters = ("none", *llm.engine.drafters.drafters)
        self.controlled = llm.draft_set.auto is not None
        if self.controlled:
            known = [name for name in self.drafters if name not in ("none", "auto")]
            metrics.watch(known, lambda: llm.saved_s, lambda: [alarm.drafter for alarm in llm.alarms])
        self._digests = [(_digest(key), tenant) for key, tenant in options.keys.items()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine's thread from start to stop."""
        self.thread.start()
        try:
            yield
        finally:
            await self.thread.stop()
            self.llm.close()

    def tenant(self, authorization: str | None) -> str | None:
        """Whose key a header holds, None for nobody's; every key is compared, each in constant time."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for digest, tenant in self._digests:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.name:
            text = f"the model {name[:200]!r} is not here; this server has {self.options.name!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    async def submit(
        self, prompts: Seq[Seq[int]], params: SamplingParams, draft: DraftSettings, tenant: str
    ) -> Reply:
        """Requests for `prompts`, taken by the engine. Raises ApiError and UsageError where they cannot run."""
        resolved = await asyncio.to_thread(self.llm.resolve, params)
        name = secrets.token_hex(8)
        requests = [
            Request(f"{name}-{i}", tuple(prompt), resolved, draft, tenant) for i, prompt in enumerate(prompts)
        ]
        reply = self.thread.submit(requests)
        await reply.open()
        self.metrics.prompt(sum(len(p) for p in prompts))
        return reply

    async def encode(self, text: str) -> list[int]:
        return await asyncio.to_thread(self.llm.encode, text)

    def chat_ids(
        self, messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation by the model's template, the answer's beginning included."""
        if self.llm.tokenizer is None:
            raise UsageError("this model comes without a tokenizer; give token ids to /v1/completions")
        if tools and not any(writes_tool_calls(t) for t in self.llm.tokenizer.chat_templates.values()):
            text = "tools: this model's chat template teaches no tool calls that this server reads"
            raise ApiError(400, text, param="tools", code="unsupported_by_model")
        return self.llm.tokenizer.encode_chat(messages, tools=tools or None)

    def decode(self, ids: Seq[int]) -> str:
        if self.llm.tokenizer is None:
            raise UsageError("this model comes without a tokenizer")
        return self.llm.tokenizer.decode(ids)


class Answer:
    """A reply written by a `writer`, whole or as chunks.

    echoed   the texts of the prompts, where they are to stand before the answers
    mute     nothing but the echo: what the engine says after the prompt is left out
    """

    def __init__(
        self, service: Service, reply: Reply, writer: Writer, *, echoed: Seq[str] = (), mute: bool = False
    ) -> None:
        self._service, self._reply, self._writer = service, reply, writer
        self._choices = [Choice(i) for i in range(reply.choices)]
        self._echoed, self._mute = echoed, mute
        self._head = {
            "id": ("chatcmpl-" if writer.kind == "chat.completion" else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": service.options.name,
        }

    async def whole(self) -> dict[str, Any]:
        """The whole answer. Raises RequestFailed where a choice failed."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async for delta in self._deltas():
            if delta.error is not None:
                self._reply.cancel()
                raise RequestFailed(delta.error)
            deltas[delta.choice].append(delta)
        choices = [self._writer.whole(c, parts) for c, parts in zip(self._choices, deltas, strict=True)]
        return self._head | {"object": self._writer.kind, "choices": choices, "usage": self.usage()}

    async def chunks(self, options: StreamOptions) -> AsyncIterator[str]:
        """The answer as chunks of JSON, what they share written once; with `include_usage` one more at the end, without
        a choice.
        """
        head = as_json(self._head | {"object": self._writer.chunk_kind})[:-1] + ',"choices":['
        said = 0

        def end() -> str:
            if options.continuous_usage_stats:
                return '],"usage":' + as_json(self._tokens(said)) + "}"
            return '],"usage":null}' if options.include_usage else "]}"

        for choice in self._choices:
            if (first := self._writer.first(choice)) is not None:
                yield head + as_json(first) + end()
        async for delta in self._deltas():
            said += len(delta.token_ids)
            yield head + as_json(self._writer.part(self._choices[delta.choice], delta)) + end()
            if delta.error is not None:
                raise RequestFailed(delta.error)
        if options.include_usage:
            yield head + '],"usage":' + as_json(self.usage()) + "}"

    def usage(self) -> dict[str, Any]:
        """Tokens, and what speculation did; the engine has finished every choice."""
        jobs = self._reply.jobs
        sequences = [s for job in jobs for s in job.sequences]
        completion = 0 if self._mute else sum(len(s.output) for s in sequences)
        rounds = sum(s.stats.draft_rounds for s in sequences)
        emitted = sum(s.stats.emitted_in_draft_rounds for s in sequences)
        settings = jobs[0].request.draft
        return self._tokens(completion) | {
            "prompt_tokens_details": {"cached_tokens": sum(job.sequences[0].stats.cached_tokens for job in jobs)},
            "speculation": {
                "drafter": settings.drafter,
                "verify": settings.verify,
                "lossless": get_rule(settings.verify).lossless,
                "rounds": sum(s.stats.rounds for s in sequences),
                "draft_rounds": rounds,
                "drafted": sum(s.stats.drafted for s in sequences),
                "accepted": sum(s.stats.accepted for s in sequences),
                "acceptance_length": emitted / rounds if rounds else None,
                "seconds_saved": sum(s.stats.saved_s for s in sequences) if self._service.controlled else None,
            },
        }

    def _tokens(self, completion: int) -> dict[str, Any]:
        prompt = sum(len(job.request.prompt) for job in self._reply.jobs)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def close(self) -> None:
        self._reply.cancel()

    async def _deltas(self) -> AsyncIterator[Delta]:
        begun: set[int] = set()
        async for delta in self._reply.deltas():
            if self._echoed and delta.choice not in begun:
                begun.add(delta.choice)
                self._choices[delta.choice].echo = self._echo(delta.choice)
            yield replace(delta, token_ids=(), accepted=(), text="", logprobs=()) if self._mute else delta

    def _echo(self, choice: int) -> Echo:
        """The prompt of a choice whose first token is there, so that all of the prompt has been scored."""
        place = max(i for i, job in enumerate(self._reply.jobs) if job.first <= choice)
        job = self._reply.jobs[place]
        return Echo(self._echoed[place], job.request.prompt, job.sequences[0].prompt_logprobs)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
