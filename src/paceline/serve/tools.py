"""Tool calls in a model's text: found as it streams, whatever the pieces it comes in.

A call is written `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as the templates of Qwen, Hermes and their
kin teach it, or the whole answer is such an object, or a list of them, and names the request's tools, as Llama 3 and
Mistral are taught and small models do anyway, some within a code fence. Whether a model writes so is read from its
template; tools for another model are refused. Text that may become a call is held back until it is one or is not (an
answer that begins with a brace or bracket, to its end); what looks like a call and is none stays text. The result does
not depend on how the text is cut (case SD-29).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallStyle", "Found", "ToolCall", "ToolScanner", "call_style", "writes_tool_calls"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCE, _LANGUAGE = "```", "json"
_LIST = "[TOOL_CALLS]"  # a special token of Mistral's, skipped when its ids are read


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text; `index` counts the calls of an answer."""

    index: int
    name: str
    arguments: str
    call_id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(slots=True)
class Found:
    """What a piece of text brought for certain."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a model writes calls: what stands before the first, between two ("" where only one is written) and after the
    last, and what it calls the arguments.
    """

    around: tuple[str, str, str]
    arguments: str


_MARKED = CallStyle((f"{_OPEN}\n", f"\n{_CLOSE}\n{_OPEN}\n", f"\n{_CLOSE}"), "arguments")
_BARE = CallStyle(("", "", ""), "parameters")
_LISTED = CallStyle(("[", ", ", "]"), "arguments")


def call_style(template: str) -> CallStyle | None:
    """The style a chat template teaches, None for none that `ToolScanner` reads."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return _MARKED
    if _LIST in template:
        return _LISTED
    return _BARE if '{"name":' in template else None


def writes_tool_calls(template: str) -> bool:
    """Whether a chat template takes tools and teaches calls that `ToolScanner` reads."""
    return call_style(template) is not None


class ToolScanner:
    """Follows one answer of a model that was given the tools `names`. White space beside a call belongs to it."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._held, self._inside, self._after_call = "", False, False
        self._bare: bool | None = None  # whether the whole answer may be calls; None while its beginning may be either
        self._space = ""  # before the call that has begun
        self.calls = 0

    def push(self, text: str) -> Found:
        self._held += text
        found = Found()
        if self._bare is None:
            self._bare = _begins_bare(self._held)
        while self._bare is False and (self._end_call(found) if self._inside else self._begin_call(found)):
            pass
        return found

    def flush(self) -> Found:
        """The end of the text: a call without its end is one where its JSON is whole."""
        found = Found()
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            self._take(held, found, held_text=_OPEN + held)
        elif self._bare and (calls := _parse_all(held, self._names)):
            found.calls += calls
            self.calls += len(calls)
        elif not (self._after_call and not held.strip()):
            found.text += held
        return found

    def _begin_call(self, found: Found) -> bool:
        """Give out text up to the next call; False where none begins yet."""
        if self._after_call:
            self._held = self._held.lstrip()
        at = self._held.find(_OPEN)
        certain = self._held[:at].rstrip() if at >= 0 else self._held[: len(self._held) - _hold(self._held)]
        found.text += certain
        self._after_call = self._after_call and not certain
        if at < 0:
            self._held = self._held[len(certain) :]
            return False
        self._space = self._held[len(certain) : at]
        self._held, self._inside = self._held[at + len(_OPEN) :], True
        return True

    def _end_call(self, found: Found) -> bool:
        at = self._held.find(_CLOSE)
        if at < 0:
            return False
        body, self._held, self._inside = self._held[:at], self._held[at + len(_CLOSE) :], False
        self._take(body, found, held_text=_OPEN + body + _CLOSE)
        return True

    def _take(self, body: str, found: Found, held_text: str) -> None:
        call = _parse(body, self.calls)
        if call is None:
            found.text += self._space + held_text
            self._after_call = False
            return
        found.calls.append(call)
        self.calls += 1
        self._after_call = True


def _hold(text: str) -> int:
    """How many characters at the end may belong to a call: white space, and the beginning of its mark."""
    mark = next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if _OPEN.startswith(text[-n:])), 0)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip())


def _begins_bare(text: str) -> bool | None:
    """Whether an answer that begins so begins with a brace or bracket, in a fence or not; None where it may yet."""
    begun = text.lstrip()
    if begun.startswith(_FENCE):
        begun = begun.removeprefix(_FENCE)
        if _LANGUAGE.startswith(begun):
            return None
        begun = begun.removeprefix(_LANGUAGE).lstrip()
    return None if _FENCE.startswith(begun) else begun[0] in "{["


def _unfenced(text: str) -> str:
    text = text.strip()
    if not text.startswith(_FENCE):
        return text
    return text.removeprefix(_FENCE).removeprefix(_LANGUAGE).removesuffix(_FENCE)


def _parse_all(text: str, names: Collection[str]) -> list[ToolCall]:
    """The calls of an answer that is nothing but a call, or a list of them, of the tools `names`; else none."""
    value = _loaded(_unfenced(text).removeprefix(_LIST))
    calls = [_call(item, i) for i, item in enumerate(value if isinstance(value, list) else [value])]
    made = [call for call in calls if call is not None and call.name in names]
    return made if len(made) == len(calls) else []


def _parse(body: str, index: int) -> ToolCall | None:
    return _call(_loaded(body), index)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, index: int) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(index, value["name"], text, "call_" + secrets.token_hex(12))
