"""The routes. Bodies are read up to a limit and parsed here, so that whatever a client sends is answered with the
protocol's error object: malformed JSON, JSON nested without end, wrong types, broken UTF-8, unknown fields.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline import __version__
from paceline.errors import PacelineError
from paceline.serve.errors import ApiError, as_api_error, from_validation
from paceline.serve.generate import chat_answer, completion_answer
from paceline.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
    template_messages,
)
from paceline.serve.schema import describe
from paceline.serve.service import Answer, Service, as_json

__all__ = ["create_app"]

_LOG = logging.getLogger(__name__)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
_OPEN_PATHS = frozenset({"/", "/health"})
Body = TypeVar("Body", bound=BaseModel)


def create_app(service: Service) -> FastAPI:
    """The application over a service, whose engine runs as long as the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app, service)
    app.add_middleware(_Keys, service=service)
    _add_generation(app, service)
    _add_text(app, service)
    _add_watching(app, service)
    describe(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        body = await _parse(request, ChatRequest, service)
        answer = await chat_answer(service, body, request.state.tenant)
        return await _respond(request, answer, body)

    @app.post("/v1/completions", summary="Continue a prompt")
    async def completions(request: Request) -> Response:
        body = await _parse(request, CompletionRequest, service)
        answer = await completion_answer(service, body, request.state.tenant)
        return await _respond(request, answer, body)


def _add_text(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", summary="The model served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", summary="The model served, by name")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.post("/tokenize", summary="A prompt's token ids")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await _parse(request, TokenizeRequest, service)
        service.check_model(body.model)
        if body.messages is not None:
            ids = await asyncio.to_thread(service.chat_ids, template_messages(body.messages))
        else:
            ids = await service.encode(body.prompt or "")
        return {"tokens": ids, "count": len(ids), "max_model_len": service.llm.max_context}

    @app.post("/detokenize", summary="The text of token ids")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await _parse(request, DetokenizeRequest, service)
        service.check_model(body.model)
        return {"prompt": await asyncio.to_thread(service.decode, body.tokens)}


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="200 while requests are taken, 503 while not")
    async def health() -> JSONResponse:
        thread = service.thread
        state = "failed" if thread.dead else "stopping" if thread.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live", summary="What the live page draws")
    async def live() -> dict[str, Any]:
        drafter = service.llm.defaults.drafter
        told: dict[str, Any] = {"model": service.options.name, "drafter": drafter, "version": __version__}
        told |= {"drafters": service.drafters, "alarms": [str(alarm) for alarm in service.llm.alarms]}
        told["saved_s"] = service.llm.saved_s if service.controlled else None
        return told | service.metrics.live.snapshot()

    style = files("paceline.report").joinpath("page.css").read_text(encoding="utf-8")
    page = files("paceline.serve").joinpath("page.html").read_text(encoding="utf-8").replace("__STYLE__", style)

    @app.get("/", summary="The live page", include_in_schema=False)
    async def root() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})


class _Keys:
    """ASGI: who asks, by API key; everything but the page's shell and `/health` needs one where keys are set."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._service.tenant(Headers(scope=scope).get("authorization"))
            if tenant is None and scope["path"] not in _OPEN_PATHS:
                text = "a valid API key is needed, as `Authorization: Bearer KEY`"
                error = ApiError(401, text, kind="authentication_error", code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                await _error(self._service, error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant or ""
        await self._app(scope, receive, send)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def refused(_: Request, error: Exception) -> JSONResponse:
        return _error(service, as_api_error(error))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:200]}: {error.detail}; /openapi.json lists what is here"
        return _error(service, ApiError(error.status_code, text, headers=dict(error.headers or {})))

    async def failed(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(service, as_api_error(error))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(PacelineError, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, failed)


async def _parse(request: Request, kind: type[Body], service: Service) -> Body:
    """The body as a `kind`. Raises ApiError: 413 where it is too long, 400 where it is not what it should be."""
    limit = service.options.max_body_bytes
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    try:
        return kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        raise from_validation(error) from error


async def _respond(request: Request, answer: Answer, body: GenerationRequest) -> Response:
    if body.stream:
        events = _events(answer, body.stream_options or StreamOptions())
        return StreamingResponse(events, media_type="text/event-stream", headers=_NO_BUFFER)
    return JSONResponse(await _unless_left(request, answer))


_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _events(answer: Answer, options: StreamOptions) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.chunks(options):
            yield _event(chunk)
    except (ApiError, PacelineError) as error:
        yield _event(as_json(as_api_error(error).body))
    finally:
        answer.close()
    yield b"data: [DONE]\n\n"


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


async def _unless_left(request: Request, answer: Answer) -> dict[str, Any]:
    """The whole answer; cancelled, and what it held freed, as soon as the client has gone."""
    whole = asyncio.ensure_future(answer.whole())
    left = asyncio.ensure_future(_until_left(request))
    try:
        await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise ApiError(499, "the client has gone", code="client_closed_request")
        return whole.result()
    finally:
        answer.close()
        for task in (whole, left):
            task.cancel()
        await asyncio.gather(whole, left, return_exceptions=True)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "paceline",
        "max_model_len": service.llm.max_context,
    }


def _error(service: Service, error: ApiError) -> JSONResponse:
    service.metrics.refused(error.status)
    return JSONResponse(error.body, error.status, headers=error.headers)
