"""How far uncalibrated predictions were from published measurements, by group: the bands of an unmeasured
plan.

`data/residuals.json` is written by `paceline validate --write-residuals` from the end-to-end rows named in
docs/planning.md; each group holds quantiles of log(predicted / measured) for times and for cost ratios.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.core.estimate import Estimate, Origin
from paceline.plan.lookup import read_table
from paceline.plan.shape import ModelShape

__all__ = ["Spread", "validated_spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """80 % factors: true time = predicted time * [time_low, time_high]; the same for (R - 1), R =
    T_round/T_plain.
    """

    time_low: float
    time_high: float
    ratio_low: float
    ratio_high: float
    origin: Origin
    source: str

    def at(self, tokens_sd: float, cost_sd: float | None) -> Spread:
        """The spread of rates at one point: costs (here, or `cost_sd` of a calibration) and acceptance
        together.
        """
        z = 1.2816
        slow, fast = math.log(self.time_high), math.log(self.time_low)
        if cost_sd is not None:
            slow, fast = z * cost_sd, -z * cost_sd
        extra = z * tokens_sd
        return dataclasses.replace(
            self, time_low=math.exp(-math.hypot(fast, extra)), time_high=math.exp(math.hypot(slow, extra))
        )

    def around(self, value: float, unit: str, inverse: bool = False) -> Estimate:
        """A rate (or, `inverse`, a time) with its range."""
        factors = (self.time_low, self.time_high) if inverse else (1 / self.time_high, 1 / self.time_low)
        low, high = value * factors[0], value * factors[1]
        return Estimate(value, min(low, value), max(high, value), unit, self.origin, self.source)


def validated_spread(shape: ModelShape) -> Spread:
    """The spread of the nearest validated group: dense, mixture of experts, or other attention (widened)."""
    table = read_table("residuals.json")
    group = "moe" if shape.is_moe else "dense"
    plain = all(a.kind == "full" for a in shape.attention)
    time, ratio = table["time"][group], table["ratio"][group]
    wider = 1.0 if plain else table["unvalidated_factor"]
    source = f"validated residuals of the {group} rows" + ("" if plain else f", widened {wider:g} times")
    return Spread(
        math.exp(-time["q90"] * wider), math.exp(-time["q10"] * wider),
        math.exp(-ratio["q90"] * wider), math.exp(-ratio["q10"] * wider), Origin.ROOFLINE, source,
    )  # fmt: skip
