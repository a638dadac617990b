"""GBNF and choices against brute force: random grammars, their texts listed without any library."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.grammar import Grammar
from paceline.decode.verify.gbnf import gbnf_to_lark
from paceline.decode.verify.grammar import GrammarCompiler
from paceline.errors import InvalidParameter

ALPHABET = "ab\n"
TOKENS = ["", *ALPHABET, "ab", "b\n"]  # id 0 ends the text
LONGEST = 4
COMPILER = GrammarCompiler(
    lambda: {i: text.encode() for i, text in enumerate(TOKENS)}, frozenset({0}), len(TOKENS), frozenset({0})
)
TEXTS = ["".join(letters) for n in range(LONGEST + 1) for letters in itertools.product(ALPHABET, repeat=n)]


@dataclass(frozen=True)
class Part:
    """An expression in GBNF, and its texts of up to LONGEST characters."""

    source: str
    texts: frozenset[str]


def joined(parts: tuple[Part, ...]) -> Part:
    texts = {""}
    for part in parts:
        texts = {a + b for a in texts for b in part.texts if len(a + b) <= LONGEST}
    return Part(" ".join(f"({p.source})" for p in parts) or '""', frozenset(texts))


def either(parts: tuple[Part, ...]) -> Part:
    return Part(" | ".join(p.source for p in parts), frozenset().union(*(p.texts for p in parts)))


def repeated(part: Part, times: tuple[str, int, int]) -> Part:
    sign, least, most = times
    runs = [joined((part,) * n).texts for n in range(least, most + 1)]
    return Part(f"({part.source}){sign}", frozenset().union(*runs))


def escaped(text: str) -> str:
    return text.replace("\n", "\\n")


LITERALS = st.text(ALPHABET, max_size=2).map(lambda text: Part(f'"{escaped(text)}"', frozenset({text})))
CLASSES = st.sampled_from(
    [
        Part("[a-b]", frozenset("ab")),
        Part("[^a]", frozenset("b\n")),
        Part(r"[\x61\u000A]", frozenset("a\n")),
        Part(".", frozenset(ALPHABET)),
    ]
)
TIMES = st.sampled_from([("?", 0, 1), ("*", 0, LONGEST), ("+", 1, LONGEST), ("{2}", 2, 2), ("{1,}", 1, LONGEST)])
EXPRESSIONS = st.recursive(
    LITERALS | CLASSES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple).map(joined),
        st.lists(inner, min_size=1, max_size=3).map(tuple).map(either),
        st.builds(repeated, inner, TIMES),
    ),
    max_leaves=6,
)


def accepted(grammar: Grammar, texts: list[str]) -> set[str]:
    """Those of `texts` that the grammar takes as a whole, spelled in single characters."""
    found = set()
    for text in texts:
        state = COMPILER.start(grammar)
        path = [TOKENS.index(char) for char in text]
        mask = state.mask(path)
        if mask is not None and mask[0]:
            found.add(text)
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(EXPRESSIONS, EXPRESSIONS)
def test_a_grammar_takes_its_own_texts_and_no_others(first: Part, second: Part) -> None:
    source = f"root ::= Rule-1 # the first\n | rule_1\nRule-1 ::= {first.source}\nrule_1 ::= (\n{second.source}\n)\n"
    texts = first.texts | second.texts
    grammar = Grammar.from_rules(source)
    assert grammar.kind == "gbnf"
    if texts:
        assert accepted(grammar, TEXTS) == texts


def test_a_rule_may_name_itself() -> None:
    nested = Grammar.from_rules('root ::= "a" root "b" | ""')
    assert accepted(nested, TEXTS) == {"", "ab", "aabb"}


def test_a_terminal_that_could_go_on_loses_no_text() -> None:
    """Lark's way of reading takes the longest match: the text `abb` is lost to it, not to GBNF."""
    rules = '("a" | "ab") ("bb" | "a")'
    assert accepted(Grammar.from_rules(f"root ::= {rules}"), TEXTS) == {"abb", "aa", "abbb", "aba"}
    assert "abb" not in accepted(Grammar.from_rules(f"start: {rules}"), TEXTS)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5))
def test_a_choice_is_one_of_its_texts(choices: list[str]) -> None:
    assert accepted(Grammar.from_choices(choices), TEXTS) == set(choices)


def test_choices_hold_any_character() -> None:
    words = ['"', "\\", "/", "[x]", "é", "\x00", "🙂", "\u2028"]
    tokens = {i: bytes([i]) for i in range(1, 256)} | {256: b"\x00"}
    compiler = GrammarCompiler(lambda: tokens, frozenset({0}), 257, frozenset({0}))
    for word in words:
        state = compiler.start(Grammar.from_choices([word]))
        path = [byte or 256 for byte in word.encode()]
        assert [state.forced(path[:i]) for i in range(len(path) + 1)] == [*path, None]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('a ::= "b"', "no rule `root`"),
        ('root ::= "a"\n  | wrong', "Line 2: there is no rule wrong"),
        ('root ::= "a"\nroot ::= "b"', "Line 2: the rule root is there twice"),
        ('root ::= "a', "no end"),
        ('root ::= ("a"', "no `\\)`"),
        ('root ::= "a")', "cannot stand here"),
        ("root ::= []", "no character"),
        ("root ::= [b-a]", "empty"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\uD800"', "no character"),
        ('root ::= "a"{3,1}', "count"),
        ("root ::= <think>", "cannot stand here"),
        ("root ::= " + "(" * 300, "more than 200"),
        ("root ::= root", "no text matches it"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(source: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        COMPILER.check(Grammar("gbnf", source))


def test_choices_are_a_list_of_texts() -> None:
    for source in ("", "[]", "{}", '["a", 1]', "["):
        with pytest.raises(InvalidParameter, match="choice"):
            Grammar("choice", source)


def test_every_rule_has_a_name_of_its_own() -> None:
    lark = gbnf_to_lark("root ::= a-b a_b aB\na-b ::= [a]\na_b ::= [b]\naB ::= [c]")
    assert len({line.partition(":")[0] for line in lark.splitlines()}) == 5
