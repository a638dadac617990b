"""Grammars as masks over token ids, by the library llguidance.

`GrammarCompiler` belongs to a vocabulary and checks and compiles grammars; `GrammarState` follows one choice: its
matcher has read the committed tokens and whatever drafts lead to the row last asked for, and takes drafts back by
count. A mask is a function of the committed tokens and the drafts before the row, nothing else.

- A token is legal where its bytes may come next: every spelling of a text in tokens, as the model itself would have
  it. Nothing is tokenised again, so the law is the model's own, given that the text matches.
- End-of-text is legal where the grammar accepts, and there only. After it no mask is asked for (case SD-25), nor
  after a draft that the grammar forbids: both have no successor, and such rows are never reached.
- What the library refuses (features of a schema, look-around in an expression) is refused by its words.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.grammar import Grammar
from paceline.decode.verify.gbnf import gbnf_to_lark
from paceline.errors import InvalidParameter, MissingExtra, RequestFailed, UsageError

__all__ = ["GrammarCompiler", "GrammarState", "json_rule"]

_HEADER = '%llguidance {"no_forcing": true}\n'  # all spellings in tokens, not the tokenizer's favourite alone
_JSON_RULES = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "lenient": False}
_KEPT = 32  # compiled grammars


class GrammarCompiler:
    """Grammars for one vocabulary.

    token_bytes     gives id -> the bytes it adds to a text; asked for with the first grammar
    special_ids     ids that add nothing; no grammar allows them, but end-of-text at its end
    vocab_size      ids there are
    eos_token_ids   of the model
    """

    def __init__(
        self,
        token_bytes: Callable[[], Mapping[int, bytes]],
        special_ids: frozenset[int],
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)
        self._token_bytes, self._special = token_bytes, special_ids
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar ahead of its use. Raises MissingExtra and InvalidParameter."""
        self.start(grammar)

    def start(self, grammar: Grammar) -> GrammarState:
        """A fresh state at the beginning of an output. Raises MissingExtra and InvalidParameter."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)  # not under the lock: who has a compiled one does not wait
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self.eos_token_ids, self.vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        if importlib.util.find_spec("llguidance") is None:
            raise MissingExtra("grammars need llguidance, not installed here; `pip install 'paceline[grammar]'`")
        from llguidance import LLMatcher, LLParserLimits

        if not self.eos_token_ids:
            raise UsageError("a grammar needs an end-of-text id to end with, and this model names none")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._new_tokenizer()
        source = _HEADER + _as_lark(grammar)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = _first_line(matcher.get_error()).replace("NoExtensionBias", "no text matches it")
            raise InvalidParameter(grammar.kind, _shown(grammar), "what llguidance can enforce", f"It says: {reason}.")
        return matcher

    def _new_tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(self.eos_token_ids)
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._token_bytes(), self._special, self.vocab_size, ends[0])),
            n_vocab=self.vocab_size,
            eos_token=ends,
        )


class _Vocabulary:
    """What llguidance reads of a tokenizer; it is never asked to tokenise a text."""

    bos_token_id: int | None = None

    def __init__(self, token_bytes: Mapping[int, bytes], special: frozenset[int], size: int, eos: int) -> None:
        self.eos_token_id = eos
        plain = {i: b for i, b in token_bytes.items() if b and i not in special}
        self.tokens = [plain.get(i, b"<|%d|>" % i) for i in range(size)]
        self.special_token_ids = [i for i in range(size) if i not in plain]

    def __call__(self, text: object) -> list[int]:
        return []


class GrammarState:
    """The committed tokens of one choice as its grammar sees them; masks of rows behind drafts."""

    __slots__ = ("_ahead", "_ended", "_ends", "_failure", "_masks", "_matcher", "_vocab_size")

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher, self._ends, self._vocab_size = matcher, eos_token_ids, vocab_size
        self._ahead: list[int] = []  # drafts the matcher has read behind the committed tokens
        self._ended = False
        self._failure: str | None = None
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def commit(self, tokens: Seq[int]) -> None:
        """Reads the tokens a round emitted, in order; an end-of-text among them is the last."""
        plain = [token for token in tokens if token not in self._ends]
        self._ended = self._ended or len(plain) < len(tokens)
        self._move(plain)
        if self._ahead != plain and self._failure is None:
            self._failure = f"token {plain[len(self._ahead)]} does not fit the grammar"
        self._ahead, self._masks = [], {}

    def legal_length(self, tokens: Seq[int]) -> int:
        """How many of `tokens` may follow one another behind the committed ones, an end-of-text as the last."""
        if self._ended:
            return 0
        plain = list(tokens)
        for place, token in enumerate(tokens):
            if token in self._ends:
                plain = plain[:place]
                break
        self._move(plain)
        reached = len(self._ahead)
        ends = reached == len(plain) < len(tokens) and self._matcher.is_accepting()
        return reached + ends

    def mask(self, path: Seq[int]) -> Tensor | None:
        """Which ids may follow the committed tokens and then `path`: [vocab_size] bool; None where nothing follows,
        for the path ends the text or leaves the grammar. Raises RequestFailed where the grammar is too complex.
        """
        key = tuple(path)
        known = self._masks.get(key)
        if known is not None:
            return known
        if self._ended or not self._ends.isdisjoint(key):
            return None
        self._move(key)
        self._check()
        if len(self._ahead) < len(key):
            return None
        packed = self._matcher.compute_bitmask()
        self._check()
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little", count=self._vocab_size)
        self._masks[key] = torch.from_numpy(bits.view(bool))
        return self._masks[key]

    def forced(self, path: Seq[int]) -> int | None:
        """The one id that may follow `path`, None where there are several, the text may end, or nothing is known."""
        try:
            mask = self.mask(path)
        except RequestFailed:  # for the verdict to say
            return None
        if mask is None or int(mask.sum()) != 1:
            return None
        token = int(mask.to(torch.uint8).argmax())
        return None if token in self._ends else token

    def _move(self, path: Seq[int]) -> None:
        """Bring the matcher as far along `path` as it goes: back to what is shared, then on."""
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if shared < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - shared)
        rest = list(path[shared:])
        read = self._matcher.try_consume_tokens(rest) if rest else 0
        self._ahead = [*self._ahead[:shared], *rest[:read]]

    def _check(self) -> None:
        if self._failure is None and self._matcher.is_error():
            self._failure = _first_line(self._matcher.get_error())
        if self._failure is not None:
            raise RequestFailed(f"the grammar cannot be followed further: {self._failure}")


def _as_lark(grammar: Grammar) -> str:
    match grammar.kind:
        case "lark":
            return grammar.source
        case "gbnf":
            return gbnf_to_lark(grammar.source)
        case "choice":
            return f"start: {' | '.join(_literal(text) for text in json.loads(grammar.source))}"
        case "regex":
            from llguidance import regex_to_lark

            return f"start: /{regex_to_lark(grammar.source)}/"
        case "json_object":
            return f"start: {json_rule({'type': 'object'})}"
        case "json_schema":
            return f"start: {json_rule(json.loads(grammar.source))}"


def json_rule(schema: Any) -> str:
    """The body of a Lark rule for JSON that fits `schema`, an object or a boolean, with a bounded run of white space
    between its parts.
    """
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _JSON_RULES}
    elif schema:
        schema = {"x-guidance": _JSON_RULES}
    return f"%json {json.dumps(schema)}"


def _literal(text: str) -> str:
    """A text as a terminal of its own."""
    return "/" + "".join(rf"\x{{{ord(char):x}}}" for char in text) + "/" if text else '""'


def _shown(grammar: Grammar) -> str:
    return grammar.source if len(grammar.source) <= 80 else grammar.source[:77] + "..."


def _first_line(message: str) -> str:
    """The sentence of an error, without the place in a source that the caller did not write."""
    line = message.strip().partition("\n")[0]
    head, _, rest = line.partition("): ")
    return (rest if head.startswith("at ") and rest else line).rstrip(".")
