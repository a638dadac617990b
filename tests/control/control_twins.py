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

    def step_s(self, drafter: int, sequences: int) -> float:
        return self.steps[drafter](sequences)


def rate_of(state: Seq[Contender], picks: Seq[Pick], cost: RoundCost, load: Load) -> float:
    """Expected tokens per second of given picks."""
    rows, tokens, extra = load.rows + len(state), load.tokens + len(state), 0.0
    depths: dict[tuple[int, int], int] = {}
    for contender, pick in zip(state, picks, strict=True):
        if pick.option is None or not pick.nodes:
            continue
        option = contender.options[pick.option]
        rows += pick.nodes
        tokens += sum(option.survival[: pick.nodes])
        extra += option.entry_s + contender.block_s * (pick.nodes // cost.block)
        if option.drafter is not None:
            for depth in range(pick.nodes):
                depths[option.drafter, depth] = depths.get((option.drafter, depth), 0) + 1
    extra += sum(cost.step_s(drafter, count) for (drafter, _), count in depths.items())
    return tokens / (cost.pass_s(rows) + extra)


def best_by_enumeration(state: Seq[Contender], cost: RoundCost, load: Load) -> float:
    """The best rate over every choice of options and nodes."""
    each = [
        [Pick(), *(Pick(i, n) for i, o in enumerate(c.options) for n in range(1, len(o.survival) + 1))] for c in state
    ]
    return max(rate_of(state, picks, cost, load) for picks in itertools.product(*each))
