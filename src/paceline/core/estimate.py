"""A number with its range, unit and origin. Nothing Paceline predicts is shown without all four."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Estimate", "Origin"]


class Origin(StrEnum):
    """Where a number comes from, from the most to the least trusted."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ROOFLINE = "roofline"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value` lies in [`low`, `high`] (an 80 % interval unless `source` says otherwise), in `unit`."""

    value: float
    low: float
    high: float
    unit: str
    origin: Origin
    source: str = ""

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"estimate {self.value} {self.unit} lies outside [{self.low}, {self.high}]")

    @classmethod
    def exact(cls, value: float, unit: str, origin: Origin = Origin.MEASURED, source: str = "") -> Estimate:
        return cls(value, value, value, unit, origin, source)

    def __str__(self) -> str:
        span = "" if self.low == self.high else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.4g}{span} {self.unit} ({self.origin})"
