"""The five guidelines of NVIDIA's post "Co-Designing AI Models Using Speculative Decoding" (its third part),
computed for one model, device and load: numbers, a sentence, and where the full cost model disagrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.estimate import Estimate, Origin
from paceline.plan.frontier import Candidate
from paceline.plan.mechanisms import Mechanism, draft_shape
from paceline.plan.residuals import Spread
from paceline.plan.rounds import target_cost
from paceline.plan.scenario import Scenario

__all__ = [
    "Guideline",
    "attention_tiles",
    "fill_the_products",
    "low_latency",
    "start_length",
    "weigh_mechanisms",
]

Array = npt.NDArray[np.float64]
TILE = 128


@dataclass(frozen=True, slots=True)
class Guideline:
    """`verdict` says what to do here; `disagreement` where the full model says otherwise, empty where it
    agrees.
    """

    number: int
    title: str
    values: Mapping[str, Estimate]
    verdict: str
    disagreement: str


def _figure(value: float, unit: str, source: str, origin: Origin = Origin.ROOFLINE) -> Estimate:
    return Estimate.exact(float(value), unit, origin, source)


def _knee(scenario: Scenario) -> float:
    """Rows at which a step without context takes 1.5 times its flat part (64 rows for a mixture of
    experts).
    """
    rows = np.geomspace(1, 65536, 400)
    seconds = np.asarray(target_cost(scenario, rows, 1.0, 0.0).total_s)
    base = float(seconds[0]) if not scenario.shape.is_moe else float(np.interp(64, rows, seconds))
    over = np.flatnonzero(seconds > 1.5 * base)
    return float(rows[over[0]]) if over.size else float(rows[-1])


def _ridge(scenario: Scenario, dtype: str, bandwidth: float) -> float:
    """M* at the rates attained, not the data sheet's."""
    c, hw = scenario.priced_by, scenario.hardware
    return hw.ridge_rows(dtype) * c.compute * c.compute_by_format[hw.compute_format(dtype)] / bandwidth


def fill_the_products(scenario: Scenario, batch: int, length: int) -> Guideline:
    """1: the draft length fills the matrix products without asking for more cache."""
    p, c, hw = scenario.precision, scenario.priced_by, scenario.hardware
    ridge = _ridge(scenario, p.linear, c.weight_bandwidth)
    expert = _ridge(scenario, p.experts, c.expert_bandwidth)
    moe = [f for f in scenario.shape.feed_forward if f.experts]
    rule = expert * moe[0].experts / moe[0].active if moe else ridge
    knee = _knee(scenario)
    values = {
        "rows at the ridge": _figure(ridge, "rows", "M* = F b / (2 BW), attained rates"),
        "batch at the ridge, D = 0": _figure(rule, "requests", "M* (times experts / active for a mixture)"),
        "batch at the ridge, D = 7": _figure(rule / 8, "requests", "M* / (1 + D)"),
        "draft length that fills this batch": _figure(max(0.0, rule / batch - 1), "tokens", "M* / B - 1"),
        "rows where a whole step takes 1.5 times as long": _figure(knee, "rows", "full cost model"),
    }
    verdict = (
        f"{hw.title} turns compute bound at {rule:.0f} rows of {scenario.shape.name}: a batch of "
        f"{rule:.0f} without "
        f"drafts, {rule / 8:.0f} with D = 7, so at batch {batch} the products have room for D = "
        f"{max(0.0, rule / batch - 1):.0f}."
    )
    off = knee / rule
    apart = ""
    if not 0.67 <= off <= 1.5:
        what = "experts, attention and launches" if moe else "attention, launches and the output head"
        apart = (
            f"the full model sees a step half as long again at {knee:.0f} rows, {off:.1f} times the rule: "
            f"{what}."
        )
    if length > max(0.0, rule / batch - 1) + 0.5:
        apart += (
            f" At batch {batch} it still prefers D = {length}: the drafts pay although the products are full."
        )
    return Guideline(1, "Fill the products with drafts, not with requests", values, verdict, apart.strip())


def _groups(scenario: Scenario) -> float:
    """Query heads per cached row on one device, of the layers that see the whole context."""
    full = [a for a in scenario.shape.attention if a.kind != "linear" and a.window is None]
    a = max(full or [x for x in scenario.shape.attention if x.kind != "linear"], key=lambda x: x.layers)
    heads, kv = max(1.0, a.heads / scenario.layout.tensor), max(1.0, a.kv_heads / scenario.layout.tensor)
    return heads / kv


def start_length(scenario: Scenario, batch: int, best_at: int) -> Guideline:
    """2: where attention dominates, begin at D = 128 / G - 1."""
    g = _groups(scenario)
    start = max(0, int(TILE // g) - 1)
    cost = target_cost(scenario, float(batch), 1.0, scenario.load.mean_context)
    attention = cost.by_operator_s.get("attention", np.zeros(()))
    share = float(np.asarray(attention / cost.total_s).ravel()[0])
    values = {
        "query heads per cached row": _figure(g, "heads", "configuration and tensor parallelism"),
        "draft length to begin at": _figure(start, "tokens", "floor(128 / G) - 1"),
        "share of the step in attention": _figure(share, "of the time", "full cost model, D = 0"),
    }
    applies = share >= 0.5
    verdict = (
        f"G = {g:g}: attention fills its tile of {TILE} at D = {start}; it takes {share:.0%} of the "
        "step at batch "
        f"{batch} and {scenario.load.mean_context:.0f} tokens, so the rule "
        f"{'applies' if applies else 'does not bind'}."
    )
    apart = "" if best_at == start else f"the full model's best length here is D = {best_at}, not {start}."
    return Guideline(2, "Where attention dominates begin at D = 128/G - 1", values, verdict, apart)


def attention_tiles(scenario: Scenario, longest: int, best_at: int) -> Guideline:
    """3: beyond that, keep G (1 + D) a multiple of 128."""
    g = _groups(scenario)
    steps = [d for d in range(longest + 1) if (g * (1 + d)) % TILE == 0]
    rows = g * (1 + best_at)
    fill = rows / (np.ceil(rows / TILE) * TILE)
    values = {
        "rows of the last tile at the chosen length": _figure(fill, "of the tiles filled", "G (1 + D) / 128"),
        "chosen draft length": _figure(best_at, "tokens", "full cost model"),
    }
    listed = ", ".join(str(d) for d in steps[:6]) if steps else f"none up to {longest}"
    verdict = f"with G = {g:g} whole tiles come at D = {listed}; D = {best_at} fills {fill:.0%} of its tiles."
    apart = ""
    if best_at not in steps and rows > TILE:
        apart = (
            f"the full model keeps D = {best_at}: a partly filled tile costs less than the acceptance it "
            "brings."
        )
    return Guideline(3, "Then keep G(1 + D) a multiple of 128", values, verdict, apart)


def low_latency(candidate: Candidate, spread: Spread) -> Guideline:
    """4: at very low latency, speedup = AL / (1 + rho D); go on while S(D+1) (1 + rho D) > rho AL(D)."""
    acceptance, grid, target = candidate.acceptance, candidate.grid, candidate.scenario.shape
    assert acceptance is not None, "a mechanism that drafts has an acceptance profile"
    rho = layer_ratio(candidate.mechanism, candidate)
    top = int(grid.lengths[-1])
    lengths, survival = acceptance.lengths(top), acceptance.survival(top)
    rule = 0
    while rule < top and survival[rule] * (1 + rho * rule) > rho * lengths[rule]:
        rule += 1
    speed = grid.speedup[0, :, 0]
    best = int(np.argmax(speed))
    values = {
        "rho": _figure(rho, "draft layers / target layers", "configuration"),
        "best length by the rule": _figure(rule, "tokens", "S(D+1) (1 + rho D) > rho AL(D)"),
        "speedup by the rule": _figure(
            lengths[rule] / (1 + rho * rule), "times", "AL / (1 + rho D)", Origin.ASSUMED
        ),
        "best length by the full model": _figure(grid.lengths[best], "tokens", "full cost model, batch 1"),
        "speedup by the full model": spread.around(float(speed[best]), "times"),
    }
    verdict = (
        f"{candidate.mechanism.label} on {target.name} has rho = {rho:.3f}: by layers alone D = {rule} and "
        f"{lengths[rule] / (1 + rho * rule):.2f} times; with launches, head and the round's fixed cost D = "
        f"{int(grid.lengths[best])} and {float(speed[best]):.2f} times."
    )
    apart = ""
    if best != rule:
        apart = (
            f"layers alone would draft {rule} tokens; the fixed cost of steps and rounds makes {best} the "
            "best."
        )
    return Guideline(4, "At low latency draft fast, and only while the gain pays", values, verdict, apart)


def layer_ratio(mechanism: Mechanism, candidate: Candidate) -> float:
    """rho: weights a draft step reads over weights a target step reads (layers, where they are alike)."""
    shape = draft_shape(mechanism, candidate.scenario.shape)
    if shape is None:
        return 0.0
    if mechanism.kind == "model":
        return shape.active_parameters / candidate.scenario.shape.active_parameters
    return shape.layers / candidate.scenario.shape.layers


def weigh_mechanisms(candidates: Sequence[Candidate], spread: Spread) -> Guideline:
    """5: the mechanism by acceptance length against overhead, at the load it will see."""
    values: dict[str, Estimate] = {}
    winners: list[str] = []
    probes = [0, len(candidates[0].grid.batches) // 2, len(candidates[0].grid.batches) - 1]
    for i in probes:
        batch = int(candidates[0].grid.batches[i])
        ranked = sorted(((float(c.grid.speedup[i, :, 0].max()), c) for c in candidates), key=lambda r: -r[0])
        for speed, c in ranked:
            d = int(c.grid.lengths[int(np.argmax(c.grid.speedup[i, :, 0]))])
            values[f"{c.mechanism.label}, batch {batch}, D = {d}"] = spread.around(speed, "times")
        name = ranked[0][1].mechanism.label if ranked[0][0] > 1.0 else "none"
        winners.append(f"{name} at batch {batch}")
    verdict = "best here: " + ", ".join(winners) + "."
    longest = max(candidates, key=lambda c: float(c.grid.tokens.max()))
    best = max(candidates, key=lambda c: float(c.grid.speedup[0, :, 0].max()))
    apart = ""
    if longest is not best:
        apart = (
            f"{longest.mechanism.label} has the longest acceptance, {best.mechanism.label} is faster at "
            "batch 1: its "
            "drafts cost less."
        )
    return Guideline(5, "Choose the mechanism by acceptance against overhead", values, verdict, apart)
