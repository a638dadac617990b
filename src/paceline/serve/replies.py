"""Answers as the protocol writes them, whole and in chunks, both from one stream of deltas.

A writer knows one shape (chat or completion): how a delta becomes a chunk's choice, and how all of a choice's
deltas become the whole choice. Token texts come from the tokens' own bytes, so that several tokens a delta and
characters cut across tokens keep their places.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.output import Delta, TokenLogprob
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.serve.tools import ToolCall, ToolScanner

__all__ = ["ChatWriter", "Choice", "CompletionWriter", "Echo", "TokenTexts", "Writer"]

_TOOLS = "tool_calls"


class TokenTexts:
    """The bytes and texts of single tokens."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: Mapping[int, bytes] = {} if tokenizer is None else tokenizer.token_bytes()

    def raw(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def text(self, token_id: int) -> str:
        return self.raw(token_id).decode("utf-8", errors="replace")

    def spelled(self, token_id: int) -> str:
        """As older completions write a token: its bytes where they are no whole characters."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def shown(self, token_id: int) -> bytes:
        """What the token adds to a text: nothing where it is special."""
        special = self._tokenizer is not None and token_id in self._tokenizer.special_ids
        return b"" if special else self.raw(token_id)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to be given back in front of a choice; `scored` has an entry for each token but the first."""

    text: str
    token_ids: Sequence[int]
    scored: Sequence[TokenLogprob]


@dataclass(slots=True)
class Choice:
    """A choice as far as it has been written. `echo` is what has yet to be written in front of it."""

    index: int
    echo: Echo | None = None
    length: int = 0
    measuring: codecs.IncrementalDecoder = field(default_factory=lambda: _decoder())
    spelling: codecs.IncrementalDecoder = field(default_factory=lambda: _decoder())
    scanner: ToolScanner | None = None

    def place(self, raw: bytes) -> int:
        """Where a token with these bytes begins in the text, in characters."""
        start = self.length
        self.length += len(self.measuring.decode(raw))
        return start


class Writer(Protocol):
    """One shape of answer. `head` stands in every chunk."""

    kind: str
    chunk_kind: str

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """A choice's chunk before its first token, None for none."""
        ...

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A delta as a chunk's choice."""
        ...

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        """All of a choice."""
        ...


class ChatWriter:
    """`chat.completion`. With `tools` (their names) calls are taken out of the text."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, logprobs: bool, tokens: bool, tools: Collection[str] = ()) -> None:
        self._texts, self._logprobs, self._tokens, self._tools = texts, logprobs, tokens, tools

    def first(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": message, "logprobs": None, "finish_reason": None}

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        text, calls = self._read(choice, delta)
        content: dict[str, Any] = {"content": text} if text else {}
        if calls:
            content["tool_calls"] = [{"index": call.index, **call.as_json()} for call in calls]
        return {"index": choice.index, "delta": content, **self._rest(choice, delta)}

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        read = [self._read(choice, delta) for delta in deltas]
        text, calls = "".join(t for t, _ in read), [call.as_json() for _, made in read for call in made]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"index": choice.index, "message": message, **self._rest(choice, *deltas)}

    def _read(self, choice: Choice, delta: Delta) -> tuple[str, list[ToolCall]]:
        """A delta's text and the calls it completes."""
        if not self._tools:
            return delta.text, []
        choice.scanner = choice.scanner or ToolScanner(self._tools)
        found = choice.scanner.push(delta.text)
        if delta.finish_reason is None:
            return found.text, found.calls
        last = choice.scanner.flush()
        return found.text + last.text, found.calls + last.calls

    def _rest(self, choice: Choice, *deltas: Delta) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._entry(x) for d in deltas for x in d.logprobs], "refusal": None}
        reason: str | None = deltas[-1].finish_reason
        called = choice.scanner is not None and choice.scanner.calls > 0
        rest = {"logprobs": logprobs, "finish_reason": _TOOLS if reason == "stop" and called else reason}
        return rest | token_list(self._texts, choice, deltas, self._tokens)

    def _entry(self, value: TokenLogprob) -> dict[str, Any]:
        return self._one(value.token_id, value.logprob) | {"top_logprobs": [self._one(*t) for t in value.top]}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token_id),
            "logprob": logprob,
            "bytes": list(self._texts.raw(token_id)),
        }


class CompletionWriter:
    """`text_completion`. `top` is how many alternatives were asked for, None for no log-probabilities."""

    kind = chunk_kind = "text_completion"

    def __init__(self, texts: TokenTexts, top: int | None, tokens: bool) -> None:
        self._texts, self._top, self._tokens = texts, top, tokens

    def first(self, choice: Choice) -> None:
        return None

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self.whole(choice, [delta])

    def whole(self, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        echo, choice.echo = choice.echo, None
        text = "".join([echo.text if echo else "", *(d.text for d in deltas)])
        lists = None if self._top is None else self._lists(choice, echo, [x for d in deltas for x in d.logprobs])
        return {
            "index": choice.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": deltas[-1].finish_reason,
        } | token_list(self._texts, choice, deltas, self._tokens)

    def _lists(self, choice: Choice, echo: Echo | None, said: list[TokenLogprob]) -> dict[str, Any]:
        values = [*(echo.scored if echo else ()), *said]
        first = list(echo.token_ids[:1]) if echo else []  # nothing stands before it, so nothing gave it a probability
        unknown: list[None] = [None] * len(first)
        ids = [*first, *(v.token_id for v in values)]
        return {
            "tokens": [self._texts.spelled(i) for i in ids],
            "token_logprobs": [*unknown, *(v.logprob for v in values)],
            "top_logprobs": [*unknown, *(self._best(v) for v in values)],
            "text_offset": [choice.place(self._texts.shown(i)) for i in ids],
        }

    def _best(self, value: TokenLogprob) -> dict[str, float]:
        """Text to log-probability, the token's own among them; of tokens spelled alike the likelier."""
        best: dict[str, float] = {}
        for token, logprob in ((value.token_id, value.logprob), *value.top):
            text = self._texts.spelled(token)
            best[text] = max(logprob, best.get(text, logprob))
        return best


def token_list(
    texts: TokenTexts, choice: Choice, deltas: list[Delta] | tuple[Delta, ...], wanted: bool
) -> dict[str, Any]:
    """`tokens`: id, the characters it completes, and whether a draft brought it; nothing unless asked for."""
    if not wanted:
        return {}
    listed = []
    for delta in deltas:
        for token, accepted in zip(delta.token_ids, delta.accepted, strict=True):
            text = choice.spelling.decode(texts.shown(token))
            listed.append({"id": token, "text": text, "draft": accepted})
    return {"tokens": listed}


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
