"""Scripted worlds: acceptance as a process, prices as a formula, the controller or a fixed policy run over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.offline import Fixed, OfflineText, Prices, Totals, run_offline
from paceline.plan.control.records import ControlOptions, DrafterFacts
from paceline.plan.probe_file import Drafts

LONGEST = 8
Acceptance = Callable[[int], float]  # position -> chance that a draft is accepted


def drafts(
    acceptance: Acceptance,
    positions: int,
    seed: int,
    confidence: float | None = None,
    speaks: Acceptance = lambda _: 1.0,
) -> Drafts:
    """Whether the drafter knows a token is drawn once for each token, as in a text."""
    generator = random.Random(seed)
    right = [generator.random() < acceptance(i) for i in range(positions + LONGEST + 1)]
    proposed, matched = [], []
    for i in range(positions):
        offered = LONGEST if generator.random() < speaks(i) else 0
        run = 0
        while run < offered and right[i + run]:
            run += 1
        proposed.append(offered)
        matched.append(run)
    stated = None if confidence is None else tuple((confidence,) * p for p in proposed)
    return Drafts(tuple(proposed), tuple(matched), stated)


def text(
    along: Mapping[int, Drafts], temperature: float = 0.0, arrives: int = 0, prompt: int = 100
) -> OfflineText:
    positions = len(next(iter(along.values())).proposed)
    return OfflineText(along, prompt, positions, temperature, arrives)


def prices(
    row: float = 0.03,
    steps: Mapping[int, float] | None = None,
    knee: int = 1 << 30,
    steep: float = 0.0,
    block: int = 1,
    slow: Callable[[int], float] = lambda _: 1.0,
    ask_s: float = 0.0,
    reading: float = 0.025,
) -> Prices:
    """A pass costs 1 + row * (rows - 1), and `steep` more for each row past `knee`; a draft step of drafter d
    steps[d], and the share `reading` of that for each sequence and each token read beyond the first."""
    rows = tuple(range(1, 161))
    passes = tuple(1.0 + row * (r - 1) + steep * max(r - knee, 0) for r in rows)
    own = {d: StepTimes((1, 201), (s, s * (1.0 + 200 * reading))) for d, s in (steps or {}).items()}
    return Prices(LiveCost(StepTimes(rows, passes), block, 160), own, ask_s, slow)


def controller(
    world: Prices, drafters: int, options: ControlOptions | None = None, seed_error: float = 1.0
) -> Controller:
    """Its costs are seeded right, or with rows `seed_error` times as dear as they are."""
    plain = world.passes.seconds(1, 0, 1)
    rows = tuple(range(1, 161))
    seed = StepTimes(rows, tuple(plain + seed_error * (world.passes.seconds(r, 0, 1) - plain) for r in rows))
    facts = [DrafterFacts(f"d{i}", world.steps.get(i)) for i in range(drafters)]
    return Controller(facts, LiveCost(seed, world.passes.block, 160), options)


def play(texts: Seq[OfflineText], policy: Controller | Fixed, world: Prices, batch: int = 1) -> Totals:
    return run_offline(texts, policy, world, batch, LONGEST)


def against_plain(texts: Seq[OfflineText], policy: Controller | Fixed, world: Prices, batch: int = 1) -> float:
    """Speed over plain decoding while the batch is full: the last texts alone say nothing of a policy under load."""
    return _rate(play(texts, policy, world, batch), batch) / _rate(play(texts, Fixed(None, 0), world, batch), batch)


def _rate(totals: Totals, batch: int) -> float:
    full = [r for r in totals.rounds if r.batch >= batch - 1]
    return sum(r.emitted for r in full) / sum(r.seconds for r in full)


def best_fixed(texts: Seq[OfflineText], world: Prices, drafters: int, batch: int = 1) -> float:
    """The best speed over plain of one drafter at one length for everything."""
    arms = [Fixed(d, n, d not in world.steps) for d in range(drafters) for n in range(1, LONGEST + 1)]
    return max(1.0, *(against_plain(texts, arm, world, batch) for arm in arms))
