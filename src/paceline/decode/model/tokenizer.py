"""Text to token ids and back, with the rules every path of the engine shares.

- Markers such as `<|im_start|>` in a text are single ids.
- Where the model's tokenizer puts a beginning-of-text token in front, every prompt begins with exactly one,
  also when its text already does (a rendered chat template).
- An end-of-text token some tokenizers append is left off: a prompt is there to be continued.
- Streamed pieces joined are `decode` of all ids; a character whose bytes are not all there yet is held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from paceline.decode.model.chat_template import render_template
from paceline.errors import UsageError

__all__ = ["TextStream", "TextTokenizer", "byte_alphabet"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TextTokenizer:
    """A model's tokenizer and chat template.

    backend         the `tokenizers.Tokenizer`; its own beginning and end markers are not used
    prefix_ids      ids in front of every prompt, usually none or the beginning-of-text token
    special_tokens  "bos_token", "eos_token" ... -> their text, as chat templates see them
    chat_templates  name -> Jinja source; "default", and "tool_use" where the model has one for tools
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        prefix_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.prefix_ids = tuple(prefix_ids)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})

    def encode(self, text: str) -> list[int]:
        """The prompt's ids, the prefix put in front unless the text begins with it."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        count = len(self.prefix_ids)
        if tuple(ids[:count]) == self.prefix_ids:
            return ids
        return [*self.prefix_ids, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids of the rendered template: the same as `encode(render_chat(...))`."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation as the model was trained to read it."""
        if not self.has_chat_template:
            raise UsageError("this model has no chat template; send it a plain prompt instead of messages.")
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            name = next(iter(self.chat_templates))
        return render_template(
            self.chat_templates[name],
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=self.special_tokens,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are skipped, ids above the vocabulary give nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self)

    def vocab(self) -> Mapping[str, int]:
        """Token as the tokenizer spells it -> id, added tokens included."""
        return self._vocab

    def token_bytes(self) -> Mapping[int, bytes]:
        """Id -> the bytes it stands for, comparable between tokenizers of different make."""
        return self._token_bytes

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self._vocab.values(), default=-1) + 1

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._vocab.get(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._vocab.get(self.eos_token)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        return frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)

    def own_text(self, token_id: int) -> str | None:
        """The text of one id wherever it stands; None where that depends on its neighbours, or is no whole text."""
        text = self._own_texts.get(token_id, "")
        if text == "":
            text = self.decode([token_id]) if self._joins_bytes else ""
            self._own_texts[token_id] = text = text if text and _REPLACEMENT not in text else None
        return text

    @cached_property
    def _joins_bytes(self) -> bool:
        """Whether a text is nothing but the bytes of its ids, one after the other."""
        return self._decoder_kinds - {"Sequence"} == {"ByteLevel"}

    @cached_property
    def _own_texts(self) -> dict[int, str | None]:
        return {}

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of single raw bytes (`<0x0A>`), where the tokenizer falls back to them."""
        if "ByteFallback" not in self._decoder_kinds:
            return frozenset()
        return frozenset(i for token, i in self._vocab.items() if _BYTE_TOKEN.fullmatch(token))

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        """The kinds of decoders at work ("ByteLevel", "ByteFallback" ...)."""
        if self.backend.decoder is None:
            return frozenset()
        state = json.loads(self.backend.decoder.__getstate__())
        return frozenset(part["type"] for part in [state, *state.get("decoders", [])])

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = {i: t.content.encode() for i, t in self.backend.get_added_tokens_decoder().items()}
        if "ByteLevel" in self._decoder_kinds:
            values = byte_alphabet()
            plain = {i: _from_alphabet(token, values) for token, i in self._vocab.items()}
        else:
            plain = {i: self._from_pieces(token, i) for token, i in self._vocab.items()}
        return plain | added

    def _from_pieces(self, token: str, index: int) -> bytes:
        if index in self.byte_ids:
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class TextStream:
    """Turns ids into text as they come.

    A piece is given out once nothing that follows can change it: not while the text ends inside a character,
    and not inside a run of single-byte tokens, which the tokenizer decodes as a whole. Decoding starts at the
    piece before the last, so the cost of an id does not grow with the text; ids that read the same everywhere are
    decoded once.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from the start of the last piece given out
        self._known = 0  # how many of them have been given out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, "" where it completes none."""
        if token_id in self._tokenizer.special_ids:
            return ""
        if len(self._ids) == self._known and (text := self._tokenizer.own_text(token_id)) is not None:
            self._ids, self._known = [], 0
            return text
        self._ids.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        piece = self._new_text()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return piece

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD; the stream is empty afterwards."""
        piece = self._new_text()
        self._ids, self._known = [], 0
        return piece

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._ids[: self._known])
        return self._tokenizer.decode(self._ids)[len(known) :]


def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE (GPT-2) writes each byte -> that byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return dict(zip(characters, [*printable, *others], strict=True))


def _from_alphabet(token: str, values: Mapping[str, int]) -> bytes:
    try:
        return bytes(values[character] for character in token)
    except KeyError:
        return token.encode()
