"""The OpenAPI document: bodies are parsed by the routes themselves, so their schemas are put in here."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = ["describe"]

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_OTHER_TYPES = {
    "/v1/chat/completions": "text/event-stream",
    "/v1/completions": "text/event-stream",
    "/metrics": "text/plain",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> None:
    """Complete what `/openapi.json` says."""
    plain = app.openapi

    def whole() -> dict[str, Any]:
        document = plain()
        if "Error" in document.setdefault("components", {}).setdefault("schemas", {}):
            return document
        place = "#/components/schemas/{model}"
        bodies: list[tuple[type[BaseModel], Literal["validation"]]] = [(m, "validation") for m in _BODIES.values()]
        _, found = models_json_schema(bodies, ref_template=place)
        document["components"]["schemas"] |= found["$defs"] | {"Error": _ERROR}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, routes in document["paths"].items():
            for route in routes.values():
                route["responses"].pop("422", None)
                route["responses"]["default"] = {"description": "An error", "content": error}
                if path in _OTHER_TYPES:
                    route["responses"]["200"]["content"][_OTHER_TYPES[path]] = {"schema": {"type": "string"}}
                if path in _BODIES:
                    schema = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
                    route["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return document

    app.openapi = whole  # type: ignore[method-assign]
