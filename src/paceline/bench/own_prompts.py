"""Prompts of our own, the same every time: a small mix to begin with, and a set that is hard on drafters.

`adversarial` holds what speculation loses on: invention (nothing to copy), words at random (nothing to guess), and
copying that changes to prose and back (what was learnt a moment ago is wrong now). The prompts are plain requests;
their answers are natural text that ends where the model ends it. `sample` is an even mix of everyday kinds, for
a probe without prompts of one's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["OWN_KINDS", "own_prompts"]

_PLACES = (
    *("a lighthouse", "a night train", "an orchard", "a harbour"),
    *("a glacier", "a market hall", "a mill", "a desert inn"),
)
_GUESTS = (
    *("a clockmaker", "two sisters", "a retired pilot", "a beekeeper"),
    *("a mapmaker", "a violinist", "a cook", "a diver"),
)
_TURNS = (
    "finds a letter without an address",
    "loses the colour blue",
    "hears tomorrow's weather in a shell",
    "must return a borrowed shadow",
    "meets a twin from another year",
    "repairs a bridge with songs",
    "teaches a crow to count",
    "keeps a secret for a river",
)
_WORDS = tuple(
    "amber basin cobalt drizzle ember fennel gravel harbour iris jacket kettle lantern meadow nickel orchard pebble "  # noqa: SIM905
    "quartz ribbon saddle timber umber velvet walnut xylem yarrow zenith anchor bramble copper dune".split()
)
_FACTS = (
    "The pump runs at 40 litres a minute and stops when the tank is full.",
    "Each crate holds 24 jars; a pallet holds 18 crates.",
    "The museum opens at nine and the last entry is at half past four.",
    "Trains to the coast leave from platform 3 every twenty minutes.",
    "The warranty covers the motor for five years and the battery for two.",
    "Members vote on the budget in May and on the board in October.",
    "The trail climbs 600 metres in 4 kilometres and is closed in winter.",
    "Samples are kept at 4 degrees and must be tested within two days.",
)
_CODE = (
    "def area(width, height):\n    return width * height\n\n\ndef total(sizes):\n    result = 0\n"
    "    for width, height in sizes:\n        result += area(width, height)\n    return result\n"
)
_TASKS = (
    "rename `area` to `surface`",
    "rename `sizes` to `boxes`",
    "add type hints",
    "add a docstring to each function",
    "replace the loop by `sum`",
    "raise ValueError for a negative width",
    "add a parameter `scale` with default 1",
    "return a float from `total`",
)


def _creative(i: int, pick: random.Random) -> str:
    place, guest, turn = pick.choice(_PLACES), pick.choice(_GUESTS), _TURNS[i % len(_TURNS)]
    return f"Write the opening of a story set in {place}, in which {guest} {turn}. Use no word twice in a sentence."


def _random_words(i: int, pick: random.Random) -> str:
    words = " ".join(pick.choices(_WORDS, k=24))
    ways = ("in another random order", "each with an unrelated adjective", "as pairs that do not rhyme")
    return f"Here are words without meaning: {words}. List 40 random words of this kind, {ways[i % len(ways)]}."


def _alternating(i: int, pick: random.Random) -> str:
    facts = pick.sample(_FACTS, k=3)
    return (
        "For each sentence below: first repeat it word for word, then invent one sentence of your own that "
        "has nothing to do with it.\n\n" + "\n".join(f"{n}. {fact}" for n, fact in enumerate(facts, start=1))
    )


def _chat(i: int, pick: random.Random) -> str:
    return f"In a few sentences: what should someone who visits {_PLACES[i % len(_PLACES)]} for the first time know?"


def _code(i: int, pick: random.Random) -> str:
    what = ("the median of a list", "the gaps in a list of days", "a word count", "the longest run of equal items")
    return f"Write a Python function that returns {what[i % len(what)]}, with a docstring and two examples."


def _edit(i: int, pick: random.Random) -> str:
    return f"Change this program: {_TASKS[i % len(_TASKS)]}. Answer with the whole program.\n\n```python\n{_CODE}```"


def _json(i: int, pick: random.Random) -> str:
    return (
        "Extract every number with its unit from the text as a JSON list of objects with the keys "
        f'"value" and "unit".\n\nText: {_FACTS[i % len(_FACTS)]} {pick.choice(_FACTS)}'
    )


_SETS: dict[str, tuple[Callable[[int, random.Random], str], ...]] = {
    "adversarial": (_creative, _random_words, _alternating),
    "sample": (_chat, _code, _edit, _json),
}
OWN_KINDS = tuple(_SETS)


def own_prompts(kind: str, count: int) -> list[tuple[str, str]]:
    """(id, text) of the first `count` prompts of a set; fewer prompts are the beginning of more, none twice."""
    makers = _SETS[kind]
    made: list[tuple[str, str]] = []
    seen: set[str] = set()
    number = 0
    while len(made) < count:
        maker = makers[number % len(makers)]
        text = maker(number // len(makers), random.Random(f"{kind}/{number}"))
        if text in seen:
            text = f"{text} (Take {number // len(makers)}.)"
        seen.add(text)
        made.append((f"{maker.__name__.strip('_')}/{number // len(makers)}", text))
        number += 1
    return made
