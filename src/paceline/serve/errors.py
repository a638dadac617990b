"""From exceptions to the protocol's error object: `{"error": {"message", "type", "param", "code"}}`.

A mistake of the client is 4xx and names the field; only our own failures are 5xx.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from paceline.errors import ContextOverflow, InvalidParameter, RequestFailed, RequestTooLarge, UsageError

__all__ = ["ApiError", "as_api_error", "from_validation", "queue_full", "stopping"]

# Of messages and answer formats: named before their fields.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_FORMATS = frozenset({"text", "json_object", "json_schema"})
_UNION = re.compile(r"[-\[]|^(str|int|float|bool|ChosenTool)$")  # pydantic's names for the branches of a union
_FORMS = "structured_outputs takes json, json_object, choice, regex or grammar"
_INSTEAD = {  # fields of other servers and of older versions, and what stands for them here
    "guided_json": "structured_outputs.json",
    "json_schema": "structured_outputs.json",
    "guided_choice": "structured_outputs.choice",
    "guided_regex": "structured_outputs.regex",
    "regex": "structured_outputs.regex",
    "guided_grammar": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
}
_INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error.

    status    HTTP status
    param     the request's field, where one is at fault
    code      a word for programs
    headers   of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception; anything that is not the caller's mistake says no more than that it failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestTooLarge):
        return ApiError(400, str(error), code="request_too_large")
    if isinstance(error, InvalidParameter):
        return ApiError(400, str(error), param=error.name, code="invalid_value")
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), kind="server_error", code="request_failed")
    return ApiError(500, "the server failed on this request; its log says why", kind="server_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, by the name of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    loc = first["loc"]
    if loc[:1] == ("response_format",) and len(loc) > 2 and loc[1] in _FORMATS:
        loc = (loc[0], *loc[2:])
    inner = [part for part in loc[:-1] if part not in _ROLES] + list(loc[-1:])
    param = ".".join(str(part) for part in inner if not _UNION.search(str(part))) or None
    if first["type"] == "extra_forbidden":
        text = f"unknown or unsupported field: {param}{_hint(param or '')}"
        return ApiError(400, text, param=param, code="unknown_parameter")
    where = "the body" if param is None else param
    said = first["msg"].removeprefix("Value error, ")  # pydantic's, before what a validator of ours says
    return ApiError(400, f"{where}: {said}", param=param, code=first["type"])


def _hint(field: str) -> str:
    """What is allowed in the place of an unknown field, where that is known."""
    if field.startswith("structured_outputs."):
        return f"; {_FORMS}"
    return f"; give {_INSTEAD[field]}" if field in _INSTEAD else ""


def queue_full(retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        f"the queue is full; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", kind="server_error", code="stopping", headers={"Retry-After": "10"})
