"""Which outputs loop: a model that repeats itself is drafted for at no effort, and flatters every drafter.

The rule, on the token ids of one output without the token that ends it. An output loops where

- it ends in a period: its last tokens are one run of p tokens, for some p, repeated at least 3 times (the
  first of them may be cut) and covering at least 32 tokens; or
- it has at least 64 tokens and fewer than 35 % of its 4-grams are distinct.

The bounds were set against written texts under a vocabulary of 152k tokens, the first 256 tokens of each: of
1,383 answers, functions, tests and code-repair prompts, one ended in such a period (a table of 58 tokens) and
one had fewer than 35 % distinct 4-grams (32 %, the tests of a function); repaired code, the most repetitive
of the answers, stayed above 41 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InvalidParameter

__all__ = ["Loop", "LoopRule", "distinct_share", "find_loop", "periodic_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRule:
    """min_repeats   of the period, >= 2
    min_period_tokens   that the repeats cover, >= 1
    ngram, min_distinct_share, min_ngram_tokens   fewer distinct n-grams than that share, in outputs that long
    """

    min_repeats: int = 3
    min_period_tokens: int = 32
    ngram: int = 4
    min_distinct_share: float = 0.35
    min_ngram_tokens: int = 64

    def __post_init__(self) -> None:
        wholes = (("min_repeats", 2), ("min_period_tokens", 1), ("ngram", 1), ("min_ngram_tokens", 1))
        for name, low in wholes:
            if getattr(self, name) < low:
                raise InvalidParameter(name, getattr(self, name), f"a whole number from {low}")
        if not 0.0 <= self.min_distinct_share <= 1.0:
            raise InvalidParameter("min_distinct_share", self.min_distinct_share, "a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class Loop:
    """Why an output loops: `period` tokens repeated over its last `tokens`; where `period` is None, too few
    distinct n-grams among all of its `tokens`."""

    tokens: int
    period: int | None = None


def find_loop(token_ids: Sequence[int], rule: LoopRule | None = None) -> Loop | None:
    """How `token_ids` loops (see the module's docstring), or None."""
    rule = rule or LoopRule()
    period, covered = periodic_end(token_ids, rule.min_repeats)
    if period is not None and covered >= rule.min_period_tokens:
        return Loop(covered, period)
    if len(token_ids) < max(rule.min_ngram_tokens, rule.ngram):
        return None
    if distinct_share(token_ids, rule.ngram) < rule.min_distinct_share:
        return Loop(len(token_ids))
    return None


def periodic_end(token_ids: Sequence[int], min_repeats: int = 3) -> tuple[int | None, int]:
    """The period whose repeats cover most of the end of `token_ids` (the shortest of equals), and how much.

    (None, 0) where nothing repeats `min_repeats` times.
    """
    count, best, best_covered = len(token_ids), None, 0
    for period in range(1, count // min_repeats + 1):
        covered = period
        while covered < count and token_ids[count - 1 - covered] == token_ids[count - 1 - covered + period]:
            covered += 1
        if covered >= min_repeats * period and covered > best_covered:
            best, best_covered = period, covered
    return best, best_covered


def distinct_share(token_ids: Sequence[int], ngram: int) -> float:
    """Distinct n-grams of all; 1 where there are none."""
    grams = [tuple(token_ids[i : i + ngram]) for i in range(len(token_ids) - ngram + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
