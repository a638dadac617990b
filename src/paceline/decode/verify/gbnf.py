"""GBNF, the grammar notation of llama.cpp, as a Lark grammar for llguidance.

Every terminal of the result is one character. llguidance takes the longest match of a terminal before it looks on, so
that longer ones would lose texts that the grammar has (`("a" | "ab") "bc"` and the text `abc`); of one character there
is no longer match, and the language stays the grammar's own. `.` and `[^...]` match line ends too.
"""

from __future__ import annotations

import re

from paceline.errors import InvalidParameter

__all__ = ["gbnf_to_lark"]

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '\\"[]'}
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NEXT_BAR = re.compile(r"(?:\s|#[^\r\n]*)*\|")
_TIMES = re.compile(r"\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}")
_DEEPEST = 200


def gbnf_to_lark(source: str) -> str:
    """Raises InvalidParameter with the line where the grammar cannot be read."""
    return _Reader(source).read()


class _Reader:
    """One pass over a source; `_at` is the place reached."""

    def __init__(self, source: str) -> None:
        self._source, self._at, self._depth = source, 0, 0
        self._asked: dict[str, int] = {}  # rule -> where it was first named

    def read(self) -> str:
        rules: dict[str, str] = {}
        self._skip(_BLANK_LINES)
        while self._at < len(self._source):
            begun, name = self._at, self._name()
            self._skip(_BLANK)
            if not self._source.startswith("::=", self._at):
                raise self._wrong("`::=` has to follow the name of a rule")
            if name in rules:
                raise self._wrong(f"the rule {name} is there twice", begun)
            self._at += 3
            self._skip(_BLANK_LINES)
            rules[name] = self._alternatives(nested=False)
            self._skip(_BLANK)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._wrong(f"{self._source[self._at]!r} cannot stand here")
            self._skip(_BLANK_LINES)
        if "root" not in rules:
            raise self._wrong("there is no rule `root`")
        for name, place in self._asked.items():
            if name not in rules:
                raise self._wrong(f"there is no rule {name}", place)
        return "\n".join([f"start: {_label('root')}", *(f"{_label(name)}: {body}" for name, body in rules.items())])

    def _alternatives(self, nested: bool) -> str:
        found = [self._sequence(nested)]
        while bar := _NEXT_BAR.match(self._source, self._at):
            self._at = bar.end()
            self._skip(_BLANK_LINES)
            found.append(self._sequence(nested))
        return " | ".join(found)

    def _sequence(self, nested: bool) -> str:
        parts: list[str] = []
        while (read := self._element()) is not None:
            times = self._times()
            parts.append(f"({read}){times}" if times else read)
            self._skip(_BLANK_LINES if nested else _BLANK)
        return " ".join(parts) or '""'

    def _element(self) -> str | None:
        here = self._source[self._at : self._at + 1]
        if here == '"':
            return self._literal()
        if here == "[":
            return self._class()
        if here == "(":
            return self._group()
        if here == ".":
            self._at += 1
            return "/(?s:.)/"
        if _NAME.match(self._source, self._at):
            place, name = self._at, self._name()
            self._asked.setdefault(name, place)
            return _label(name)
        return None

    def _group(self) -> str:
        begun = self._at
        self._at, self._depth = self._at + 1, self._depth + 1
        if self._depth > _DEEPEST:
            raise self._wrong(f"more than {_DEEPEST} groups in one another")
        self._skip(_BLANK_LINES)
        inner = self._alternatives(nested=True)
        if not self._source.startswith(")", self._at):
            raise self._wrong("this group has no `)`", begun)
        self._at, self._depth = self._at + 1, self._depth - 1
        return f"({inner})"

    def _literal(self) -> str:
        begun, said = self._at, []
        self._at += 1
        while not self._source.startswith('"', self._at):
            said.append(_one(self._char(begun)))
        self._at += 1
        return f"({' '.join(said)})" if len(said) > 1 else said[0] if said else '""'

    def _class(self) -> str:
        begun, said = self._at, ""
        self._at += 1
        if negated := self._source.startswith("^", self._at):
            self._at += 1
        while not self._source.startswith("]", self._at):
            first = last = self._char(begun)
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                self._at += 1
                last = self._char(begun)
            if first > last:
                raise self._wrong(f"the range {first!r} to {last!r} is empty", begun)
            said += rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}"
        self._at += 1
        if not said and not negated:
            raise self._wrong("this class holds no character", begun)
        return f"/[{'^' if negated else ''}{said}]/" if said else "/(?s:.)/"

    def _char(self, begun: int) -> str:
        """The next character of the literal or class begun there, its escape undone."""
        char = self._source[self._at : self._at + 1]
        if not char or char in "\r\n":
            raise self._wrong("this has no end on its line; write line ends as \\n", begun)
        self._at += 1
        if char != "\\":
            return char
        kind = self._source[self._at : self._at + 1]
        self._at += 1
        if kind in _PLAIN:
            return _PLAIN[kind]
        digits = self._source[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
            raise self._wrong(f"the escape \\{kind}{digits} is not known")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._wrong(f"the escape \\{kind}{digits} is no character")
        return chr(code)

    def _times(self) -> str:
        here = self._source[self._at : self._at + 1]
        if here and here in "*+?":
            self._at += 1
            return here
        if here != "{":
            return ""
        found = _TIMES.match(self._source, self._at)
        if found is None or (found[3] and (not found[2] or int(found[3]) < int(found[1]))):
            raise self._wrong("a count is {3}, {3,} or {3,5}")
        self._at = found.end()
        return f"{{{found[1]}{found[2]}{found[3]}}}"

    def _name(self) -> str:
        found = _NAME.match(self._source, self._at)
        if found is None:
            raise self._wrong(f"{self._source[self._at]!r} stands where the name of a rule has to")
        self._at = found.end()
        return found[0]

    def _skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self._source, self._at)
        assert found is not None, "a pattern that matches nothing at least"
        self._at = found.end()

    def _wrong(self, reason: str, place: int | None = None) -> InvalidParameter:
        line = self._source.count("\n", 0, self._at if place is None else place) + 1
        shown = self._source if len(self._source) <= 80 else self._source[:77] + "..."
        return InvalidParameter("gbnf", shown, "a grammar in GBNF", f"Line {line}: {reason}.")


def _label(name: str) -> str:
    """A rule's name as Lark takes it, another for every name."""
    return "r_" + "".join(c if c.islower() or c.isdigit() else f"_{ord(c):x}_" for c in name)


def _one(char: str) -> str:
    return rf"/\x{{{ord(char):x}}}/"
