"""Exact enumeration: models over tiny vocabularies in rational numbers, and every answer of chance in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from paceline.core.proposal import TargetToken

__all__ = ["Law", "Models", "Row", "Tape", "explore", "extend", "row_of"]

Row = tuple[Fraction, ...]
Law = dict[tuple[int, ...], Fraction]
T = TypeVar("T")


def row_of(weights: Sequence[int]) -> Row:
    return tuple(Fraction(w, sum(weights)) for w in weights)


class Models:
    """Target and drafter over a tiny vocabulary: a row for each context, rational, some entries zero."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

    def row(self, who: str, context: tuple[int, ...]) -> Row:
        generator = np.random.default_rng([self.seed, len(who), *context, len(context)])
        weights = generator.integers(0, 6, self.vocab)
        weights[generator.integers(self.vocab)] += 1
        return row_of(weights.tolist())

    def target_law(self, length: int) -> Law:
        law: Law = {(): Fraction(1)}
        for _ in range(length):
            law = {
                (*text, token): weight * chance
                for text, weight in law.items()
                for token, chance in enumerate(self.row("target", text))
                if chance > 0
            }
        return law


def extend(models: Models, law: Law, length: int) -> Law:
    """Every text made `length` tokens long by the target itself."""
    result: Law = defaultdict(Fraction)
    for text, weight in law.items():
        pending = {text: weight}
        while pending:
            known, w = pending.popitem()
            if len(known) >= length:
                result[known[:length]] += w
                continue
            for token, chance in enumerate(models.row("target", known)):
                if chance > 0:
                    pending[(*known, token)] = w * chance
    return dict(result)


class Tape:
    """Answers every question of chance as told, then with the first possible answer; keeps the books of `explore`.

    It is the `Chances` of a rule and the dice of a drafter.
    """

    def __init__(self, told: tuple[int, ...]) -> None:
        self.told, self.given = told, 0
        self.weight = Fraction(1)
        self.untried: list[tuple[int, ...]] = []

    def choose(self, weights: Sequence[Fraction]) -> int:
        """An index of the weights, which sum to one."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if self.given < len(self.told):
            answer = self.told[self.given]
        else:
            answer = possible[0]
            self.untried += [(*self.told, other) for other in possible[1:]]
            self.told = (*self.told, answer)
        self.given += 1
        self.weight *= weights[answer]
        return answer

    def accept(self, ahead: int, token: int, chance: Any) -> bool:
        chance = min(Fraction(1), Fraction(chance))
        return self.choose([chance, 1 - chance]) == 0

    def draw(self, ahead: int, weights: Any, kind: TargetToken = "bonus") -> int:
        total = sum(weights)
        return self.choose([weight / total for weight in weights])


def explore(run: Callable[[Tape], T]) -> dict[T, Fraction]:
    """The law of what `run` returns, over all answers."""
    law: dict[T, Fraction] = defaultdict(Fraction)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        tape = Tape(pending.pop())
        result = run(tape)
        law[result] += tape.weight
        pending += tape.untried
    assert sum(law.values()) == 1
    return dict(law)
