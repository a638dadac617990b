"""A grammar that the whole output has to match: what is asked for, not how it is enforced.

    json_object  any JSON object; `source` is empty
    json_schema  JSON that fits the schema, `source` is its JSON text
    regex        the text matches the expression from end to end
    choice       the text is one of several, `source` is their JSON list
    lark         a grammar in the dialect of Lark that llguidance reads, rule `start`
    gbnf         a grammar in the notation of llama.cpp, rule `root`

An output cut short (by `max_tokens`, a stop string, a stop id) is the beginning of a match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import InvalidParameter

__all__ = ["Grammar", "GrammarKind"]

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]
_LONGEST = 1 << 20  # characters of a source
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark has no line that begins so


@dataclass(frozen=True, slots=True)
class Grammar:
    """See the module's docstring. Raises InvalidParameter; whether it can be enforced is known to the engine."""

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidParameter("grammar kind", self.kind, ", ".join(get_args(GrammarKind)))
        if not isinstance(self.source, str) or len(self.source) > _LONGEST:
            raise InvalidParameter(self.kind, f"a source of {type(self.source).__name__}", f"text up to {_LONGEST}")
        if (self.kind == "json_object") != (self.source == ""):
            raise InvalidParameter(self.kind, self.source[:80], "a source, for all kinds but json_object")
        if self.kind == "json_schema":
            _check_schema(self.source)
        if self.kind == "choice":
            _check_choices(self.source)

    @classmethod
    def from_schema(cls, schema: Any) -> Grammar:
        """The grammar of a schema as parsed JSON: an object or a boolean."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def from_choices(cls, choices: Sequence[str]) -> Grammar:
        """The grammar of texts, one of which has to be said."""
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def from_rules(cls, source: str) -> Grammar:
        """A grammar written in GBNF or in Lark's notation, told apart by their first signs of a rule."""
        return cls("gbnf" if _GBNF_RULE.search(source) else "lark", source)


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("json_schema", source[:80], "a JSON schema", f"It is not JSON: {error}.") from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidParameter("json_schema", source[:80], "a JSON schema: an object, true or false")


def _check_choices(source: str) -> None:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise InvalidParameter("choice", source[:80], "a list of texts, at least one")
