"""What a body says an answer has to match, as a grammar for the engine.

`response_format` and `structured_outputs` say it of the whole text. A call that must be made (`tool_choice` "required"
or a function's name) is a grammar too: the marks and the shape that the model's own template teaches, the arguments by
their schemas. `auto` leaves the model free, so promises about calls it may or may not make are refused by name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.core.grammar import Grammar
from paceline.core.sampling import SamplingParams
from paceline.decode.verify.grammar import json_rule
from paceline.errors import UsageError
from paceline.serve.errors import ApiError
from paceline.serve.protocol import (
    ChatRequest,
    ChosenTool,
    GenerationRequest,
    JsonFormat,
    SchemaFormat,
    StructuredOutputs,
    Tool,
)
from paceline.serve.service import Service
from paceline.serve.tools import CallStyle, call_style

__all__ = ["constrain", "text_grammar", "tool_grammar"]


def text_grammar(body: GenerationRequest) -> tuple[str, Grammar] | None:
    """The field that asks for it and the grammar of the whole text, None where any text will do."""
    if isinstance(body.response_format, JsonFormat):
        return "response_format", Grammar("json_object")
    if isinstance(body.response_format, SchemaFormat):
        schema = body.response_format.json_schema.schema_
        return "response_format", Grammar("json_object") if schema is None else Grammar.from_schema(schema)
    return None if body.structured_outputs is None else _structured(body.structured_outputs)


def _structured(asked: StructuredOutputs) -> tuple[str, Grammar]:
    place, schema = "structured_outputs.", asked.schema_
    if asked.json_object:
        return place + "json_object", Grammar("json_object")
    if asked.choice is not None:
        return place + "choice", Grammar.from_choices(asked.choice)
    if asked.regex is not None:
        return place + "regex", Grammar("regex", asked.regex)
    if asked.grammar is not None:
        return place + "grammar", Grammar.from_rules(asked.grammar)
    try:
        grammar = Grammar("json_schema", schema) if isinstance(schema, str) else Grammar.from_schema(schema)
    except UsageError as error:
        raise _refused(place + "json", str(error)) from error
    return place + "json", grammar


def tool_grammar(body: ChatRequest, templates: Sequence[str]) -> tuple[str, Grammar] | None:
    """As `text_grammar`, for calls that must be made. Raises ApiError for what cannot be promised."""
    tools = body.tools or []
    if body.tool_choice == "none":
        return None
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, ChosenTool)
    if not tools:
        if forced:
            raise _refused("tool_choice", "there are no tools to choose from")
        return None
    for field in body.form_fields:
        raise _refused(field, 'an answer of a given form calls no tools; give tool_choice: "none"')
    if not forced:
        if body.parallel_tool_calls is False:
            raise _refused("parallel_tool_calls", 'false is kept only with tool_choice "required" or a name')
        if any(tool.function.strict for tool in tools):
            raise _refused("tools", 'strict: true is kept only with tool_choice "required" or a name')
        return None
    if isinstance(body.tool_choice, ChosenTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise _refused("tool_choice", f"{name[:100]!r} is none of the tools")
    style = next((style for t in templates if (style := call_style(t)) is not None), None)
    if style is None:
        raise _refused("tools", "this model's chat template teaches no tool calls that this server reads")
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    return "tools", Grammar("lark", _calls(tools, style, several))


async def constrain(
    service: Service, params: SamplingParams, asked: tuple[str, Grammar] | None
) -> SamplingParams:
    """`params` with the grammar, tried; the error names the field that asked. Raises ApiError and InvalidParameter."""
    if asked is None:
        return params
    field, grammar = asked
    params = replace(params, grammar=grammar)
    try:
        await asyncio.to_thread(service.llm.check_grammar, grammar)
    except UsageError as error:
        raise _refused(field, str(error)) from error
    return params


def _calls(tools: Sequence[Tool], style: CallStyle, several: bool) -> str:
    """A grammar of one call, or of one and more where the style has a way to part them."""
    before, between, after = style.around
    more = f"({json.dumps(between)} call)*" if several and between else ""
    names = " | ".join(f"f{i}" for i in range(len(tools)))
    lines = [f"start: {_text(before)} call {more} {_text(after)}", f"call: {names}"]
    for i, tool in enumerate(tools):
        head = '{"name": ' + json.dumps(tool.function.name) + f', "{style.arguments}": '
        schema: dict[str, Any] = {"type": "object"} | (tool.function.parameters or {"additionalProperties": False})
        lines += [f"f{i}: {json.dumps(head)} a{i} \"}}\"", f"a{i}: {json_rule(schema)}"]
    return "\n".join(lines)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _refused(field: str, text: str) -> ApiError:
    return ApiError(400, f"{field}: {text}", param=field, code="invalid_value")
