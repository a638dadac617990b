"""Request bodies: what may stand in them, and what it means for the engine.

A field is honoured or refused by name; nothing is ignored. Types are strict: "3" is not a number. Fields of the
protocol that only ask for what happens anyway (`store: false`, `service_tier: "auto"`) are taken with that value
alone. Defaults are the protocol's: temperature 1.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.sampling import SamplingParams
from paceline.decode.sequence import DraftSettings
from paceline.decode.verify.rules import get_rule
from paceline.errors import UsageError
from paceline.serve.errors import ApiError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Message",
    "Speculation",
    "StreamOptions",
    "TokenizeRequest",
    "draft_settings",
    "sampling_params",
    "template_messages",
    "template_tools",
]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=4_000_000)]
_MAX_CHOICES = 128


class Strict(BaseModel):
    """No unknown fields, no conversions, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculation(Strict):
    """Who drafts for this request, how far, and by which rule; what is left out is the server's own choice.

    tokens   give every token with its text and whether a draft brought it
    """

    draft: str | None = None
    draft_length: Annotated[int, Field(ge=0, le=128)] | Literal["auto"] | None = None
    tree_size: Annotated[int, Field(ge=1, le=512)] | None = None
    verify: str | None = None
    tokens: bool = False


class StreamOptions(Strict):
    """include_usage            one more chunk at the end, with the usage
    continuous_usage_stats   also the tokens so far, in every chunk
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _usage_at_all(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats is allowed only with include_usage: true")
        return self


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """`strict` or not, the answer fits the schema; without one it is a JSON object."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """What the whole answer matches, by one of these.

    json         a JSON schema, as an object or as its text
    json_object  true: any JSON object
    choice       one of these texts
    regex        an expression, from end to end
    grammar      in GBNF (rule `root`) or in Lark's notation (rule `start`)
    """

    schema_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=4096)] | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [self.schema_, self.json_object, self.choice, self.regex, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give one of json, json_object, choice, regex and grammar")
        return self


class GenerationRequest(Strict):
    """What both ways of asking share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Annotated[list[Text], Field(max_length=1024)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    min_tokens: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream: true")
        return self

    @property
    def form_fields(self) -> list[str]:
        """The fields that say what the whole answer has to match; none where any text will do."""
        asked = [] if self.response_format is None or self.response_format.type == "text" else ["response_format"]
        return asked if self.structured_outputs is None else [*asked, "structured_outputs"]

    @model_validator(mode="after")
    def _one_form(self) -> GenerationRequest:
        if len(self.form_fields) > 1:
            raise ValueError("give response_format or structured_outputs, not both")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: Text


Content = Text | list[TextPart]


class InstructionMessage(Strict):
    """A turn of several parts is their text joined."""

    role: Literal["system", "developer", "user"]
    content: Content


class CalledFunction(Strict):
    name: Text
    arguments: Text


class CallMade(Strict):
    id: Text
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """What the model said before, the calls it made included."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: None = None
    tool_calls: list[CallMade] | None = None


class ToolMessage(Strict):
    """What a call gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Text


Message = Annotated[InstructionMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    """`strict: true` promises arguments that fit `parameters`: taken where the call is constrained to them."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenName(Strict):
    name: Text


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenName


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or the older max_tokens, not both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs: true")
        return self


class CompletionRequest(GenerationRequest):
    """`prompt` is a text, several, token ids, or several lists of them."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class TokenizeRequest(Strict):
    """A text, or messages as the chat template writes them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]


def sampling_params(body: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The engine's options; those a body leaves out take the protocol's defaults. Raises InvalidParameter."""
    given: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": logprobs}
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "min_tokens", "ignore_eos", "n", "seed"),
    ):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    for name in ("bad_words", "allowed_token_ids", "stop_token_ids"):
        if (value := getattr(body, name)) is not None:
            given[name] = tuple(value)
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        given["logit_bias"] = _biases(body.logit_bias)
    return SamplingParams(**given)


def draft_settings(asked: Speculation | None, default: DraftSettings, known: Collection[str]) -> DraftSettings:
    """Who drafts: the server's own choice, changed where the body says so; `known` are the drafters it has."""
    if asked is None:
        return default
    if asked.draft is not None and asked.draft not in known:
        text = f"the drafter {asked.draft[:100]!r} is not here; this server has {', '.join(known)}"
        raise ApiError(400, text, param="speculation.draft", code="invalid_value")
    if asked.verify is not None:
        try:
            get_rule(asked.verify)
        except UsageError as error:
            text = f"speculation.verify: {error}"
            raise ApiError(400, text, param="speculation.verify", code="invalid_value") from error
    length: int | None = default.draft_length if asked.draft is None else None
    if asked.draft_length is not None:
        length = None if asked.draft_length == "auto" else asked.draft_length
    drafter = asked.draft if asked.draft is not None else default.drafter
    if drafter == "none" and length:
        text = "draft_length does nothing where nothing drafts; leave it out with draft: none"
        raise ApiError(400, text, param="speculation.draft_length", code="invalid_value")
    same = asked.draft is None and asked.draft_length is None
    tree_size = asked.tree_size if asked.tree_size is not None or not same else default.tree_size
    rule = asked.verify or default.verify
    return DraftSettings(drafter, length, rule, tree_size, default.relaxed if rule == "relaxed" else None)


def template_messages(messages: list[Message]) -> list[Mapping[str, Any]]:
    """Turns as chat templates read them: `developer`, the newer word for `system`, is known to few; the arguments of
    calls are objects, not JSON text."""
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if isinstance(message, AssistantMessage) and message.tool_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return turns


def template_tools(body: ChatRequest) -> list[Mapping[str, Any]]:
    """The functions a template is to show; none where they may not be called."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _call(made: CallMade) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(made.function.arguments)
    except (ValueError, RecursionError) as error:
        text = "messages: the arguments of a tool call are not JSON"
        raise ApiError(400, text, param="messages", code="invalid_value") from error
    function = {"name": made.function.name, "arguments": arguments}
    return {"id": made.id, "type": "function", "function": function}


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            text = f"logit_bias: {key[:40]!r} is not a token id"
            raise ApiError(400, text, param="logit_bias", code="invalid_value")
        biases[int(key)] = value
    return biases
