"""A grammar that the whole output has to match: what is asked for, not how it is enforced.

    json_object  any JSON object; `source` is empty
    json_schema  JSON that fits the schema, `source` is its JSON text
    regex        the text matches the expression from end to end
    lark         a grammar in the dialect of Lark that llguidance reads, rule `start`

An output cut short (by `max_tokens`, a stop string, a stop id) is the beginning of a match.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import InvalidParameter

__all__ = ["Grammar", "GrammarKind"]

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]
_LONGEST = 1 << 20  # characters of a source


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

    @classmethod
    def from_schema(cls, schema: Any) -> Grammar:
        """The grammar of a schema as parsed JSON: an object or a boolean."""
        return cls("json_schema", json.dumps(schema))


def _check_schema(source: str) -> None:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("json_schema", source[:80], "a JSON schema", f"It is not JSON: {error}.") from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidParameter("json_schema", source[:80], "a JSON schema: an object, true or false")
