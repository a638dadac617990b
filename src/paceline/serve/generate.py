"""From a parsed body to a running answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from paceline.serve.errors import ApiError
from paceline.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    draft_settings,
    sampling_params,
    template_messages,
    template_tools,
)
from paceline.serve.replies import ChatWriter, CompletionWriter
from paceline.serve.service import Answer, Service
from paceline.serve.structured import constrain, text_grammar, tool_grammar

__all__ = ["chat_answer", "completion_answer"]

_COMPLETION_TOKENS = 16  # the protocol's default for /v1/completions


async def chat_answer(service: Service, body: ChatRequest, tenant: str) -> Answer:
    """Raises ApiError and PacelineError where the request cannot run."""
    service.check_model(body.model)
    top = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    templates = [] if service.llm.tokenizer is None else list(service.llm.tokenizer.chat_templates.values())
    asked = tool_grammar(body, templates) or text_grammar(body)
    params = await constrain(service, sampling_params(body, limit, top), asked)
    tools = template_tools(body)
    prompt = await asyncio.to_thread(service.chat_ids, template_messages(body.messages), tools)
    draft = draft_settings(body.speculation, service.llm.defaults, service.drafters)
    reply = await service.submit([prompt], params, draft, tenant)
    names = [tool["function"]["name"] for tool in tools]
    writer = ChatWriter(service.texts, top is not None, _wants_tokens(body), names)
    return Answer(service, reply, writer)


async def completion_answer(service: Service, body: CompletionRequest, tenant: str) -> Answer:
    """Raises ApiError and PacelineError where the request cannot run."""
    service.check_model(body.model)
    limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    mute = limit == 0 and bool(body.echo)
    params = sampling_params(body, 1 if mute else limit, body.logprobs)
    params = await constrain(service, params, text_grammar(body))
    if body.echo:
        params = replace(params, prompt_logprobs=body.logprobs)
    prompts = await _prompts(service, body)
    echoed = await asyncio.to_thread(_texts, service, body.prompt, prompts) if body.echo else []
    draft = draft_settings(body.speculation, service.llm.defaults, service.drafters)
    reply = await service.submit(prompts, params, draft, tenant)
    writer = CompletionWriter(service.texts, body.logprobs, _wants_tokens(body))
    return Answer(service, reply, writer, echoed=echoed, mute=mute)


def _texts(service: Service, given: object, prompts: list[list[int]]) -> list[str]:
    """Each prompt as it was given, or as its ids read."""
    texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if texts and all(isinstance(text, str) for text in texts):
        return texts
    return [service.decode(ids) for ids in prompts]


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [await service.encode(given)]
    if not given:
        raise ApiError(400, "the prompt is empty; give at least one token", param="prompt", code="invalid_value")
    capacity = service.thread.capacity
    if not isinstance(given[0], int) and len(given) > capacity:
        text = f"{len(given)} prompts in one request; this server holds {capacity} choices at most"
        raise ApiError(400, text, param="prompt", code="too_many_choices")
    if isinstance(given[0], int):
        return [[token for token in given if isinstance(token, int)]]
    return [await service.encode(p) if isinstance(p, str) else list(p) for p in given if not isinstance(p, int)]


def _wants_tokens(body: GenerationRequest) -> bool:
    return body.speculation is not None and body.speculation.tokens
