"""Slow, obvious versions of what the controller computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.plan.control.lengths import Contender, Load, Pick, RoundCost


@dataclass
class Formula:
    """A round's cost as functions."""

    passes: Callable[[int], float]
    steps: dict[int, Callable[[int], float]] = field(default_factory=dict)
    block: int = 1

    def pass_s(self, rows: int) -> float:
        return self.passes(rows)

    def passes_s(self, rows: int, count: int) -> list[float]:
        return [self.passes(rows + more) for more in range(count)]

    def step_s(self, drafter: int, sequences: int) -> float:
        return self.steps[drafter](sequences)


def rate_of(state: Seq[Contender], picks: Seq[Pick], cost: RoundCost, load: Load) -> float:
    """Expected tokens per second of given picks."""
    rows, tokens, extra = load.rows + len(state), load.tokens + len(state), 0.0
    depths: dict[tuple[int, int], int] = {}
    for contender, pick in zip(state, picks, strict=True):
        if pick.option is None or not pick.length:
            continue
        option = contender.options[pick.option]
        rows += pick.length
        tokens += sum(option.survival[: pick.length])
        extra += option.entry_s + contender.block_s * (pick.length // cost.block)
        if option.drafter is not None:
            for depth in range(pick.length):
                depths[option.drafter, depth] = depths.get((option.drafter, depth), 0) + 1
    extra += sum(cost.step_s(drafter, count) for (drafter, _), count in depths.items())
    return tokens / (cost.pass_s(rows) + extra)


class SlowLearner:
    """`Learner`, one outcome after the other, every number from its definition."""

    def __init__(self, table: SlowTable, temperatures: int, asked_blind: bool) -> None:
        self.table, self.temperatures, self.asked_blind = table, temperatures, asked_blind
        self.corrections: dict[tuple[bool, bool], list[float]] = {}  # accepted, expected, outcomes

    def acceptance(self, position: int, stated: float | None) -> float:
        chance = self.table.estimate(position, stated, self.temperatures)
        accepted, expected, outcomes = self.corrections.get((position > 0, stated is not None), (0.0, 0.0, 0.0))
        observed = (accepted + 5.0 * chance) / (outcomes + 5.0)
        foreseen = (expected + 5.0 * chance) / (outcomes + 5.0)
        odds = chance / (1.0 - chance) * observed / (1.0 - observed) / (foreseen / (1.0 - foreseen))
        return odds / (1.0 + odds)

    def survival(self, confidence: Seq[float | None], floor: float) -> list[float]:
        products, product = [], 1.0
        for position, stated in enumerate(confidence):
            product *= self.acceptance(position, stated)
            if product < floor:
                break
            products.append(product)
        return products

    def record(self, first: int, confidence: Seq[float | None], hits: int) -> None:
        for i, stated in enumerate(confidence):
            self._one(first + i, stated, i < hits)
            if stated is not None and self.asked_blind:
                self._one(first + i, None, i < hits)
            elif stated is not None and first + i == 0:
                self.table.record(0, None, i < hits, self.temperatures)

    def _one(self, position: int, stated: float | None, hit: bool) -> None:
        expected = self.table.estimate(position, stated, self.temperatures)
        self.table.record(position, stated, hit, self.temperatures)
        old = self.corrections.get((position > 0, stated is not None), [0.0, 0.0, 0.0])
        new = [0.97 * number + more for number, more in zip(old, (hit, expected, 1.0), strict=True)]
        self.corrections[position > 0, stated is not None] = new

    def fade(self, share: float) -> None:
        self.corrections = {key: [share * n for n in numbers] for key, numbers in self.corrections.items()}


class SlowTable:
    """`AcceptanceTable` from its definition: from the prior to all temperatures to the own range."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int | None, int, int | None], tuple[float, float]] = {}

    def estimate(self, position: int, stated: float | None, temperatures: int) -> float:
        cell = min(position, 7), None if stated is None else tenth(stated)
        pooled = self._towards(0.6 if stated is None else min(max(stated, 0.01), 0.99), (None, *cell))
        return self._towards(pooled, (temperatures, *cell))

    def _towards(self, prior: float, key: tuple[int | None, int, int | None]) -> float:
        accepted, total = self.counts.get(key, (0.0, 0.0))
        return (accepted + 8.0 * prior) / (total + 8.0)

    def record(self, position: int, stated: float | None, hit: bool, temperatures: int) -> None:
        cell = min(position, 7), None if stated is None else tenth(stated)
        for key in ((temperatures, *cell), (None, *cell)):
            accepted, total = self.counts.get(key, (0.0, 0.0))
            accepted, total = accepted + hit, total + 1.0
            self.counts[key] = (accepted * min(1.0, 256.0 / total), min(total, 256.0))


def tenth(stated: float) -> int:
    return int(stated * 10) if stated < 0.9 else 9 + (stated >= 0.95) + (stated >= 0.98)


def best_by_enumeration(state: Seq[Contender], cost: RoundCost, load: Load) -> float:
    """The best rate over every choice of options and nodes."""
    each = [
        [Pick(), *(Pick(i, n) for i, o in enumerate(c.options) for n in range(1, len(o.survival) + 1))] for c in state
    ]
    return max(rate_of(state, picks, cost, load) for picks in itertools.product(*each))
