"""What `relaxed` takes for likely enough. No torch.

    typical:EPSILON,DELTA   probability above min(EPSILON, DELTA * exp(-entropy)): typical acceptance
                            (Medusa, arXiv 2401.10774); `typical` alone is 0.09,0.3
    top:COUNT,MARGIN        among the COUNT most probable tokens and within MARGIN of the most probable one

Both are about the target's probabilities after all sampling options. Neither keeps the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidParameter

__all__ = ["Leniency", "TopWithin", "Typical", "check_leniency", "parse_leniency"]

_FORMS = "typical, typical:EPSILON,DELTA or top:COUNT,MARGIN"


@dataclass(frozen=True, slots=True)
class Typical:
    """epsilon in (0, 1], delta >= 0: a draft is likely enough above min(epsilon, delta * exp(-entropy))."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon <= 1.0:
            raise InvalidParameter("relaxed epsilon", self.epsilon, "a number above 0 and up to 1")
        if not 0.0 <= self.delta < float("inf"):
            raise InvalidParameter("relaxed delta", self.delta, "a number from 0")

    def __str__(self) -> str:
        return f"typical:{self.epsilon:g},{self.delta:g}"


@dataclass(frozen=True, slots=True)
class TopWithin:
    """count >= 1, margin in [0, 1): likely enough are the first `count` tokens within `margin` of the first."""

    count: int
    margin: float

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise InvalidParameter("relaxed count", self.count, "a whole number from 1")
        if not 0.0 <= self.margin < 1.0:
            raise InvalidParameter("relaxed margin", self.margin, "a number from 0 to below 1")

    def __str__(self) -> str:
        return f"top:{self.count},{self.margin:g}"


Leniency = Typical | TopWithin


def parse_leniency(text: str) -> Leniency:
    """One of the forms in the module's docstring; raises InvalidParameter."""
    kind, colon, rest = text.partition(":")
    if text == "typical":
        return Typical()
    try:
        first, second = rest.split(",")
        if kind == "typical" and colon:
            return Typical(float(first), float(second))
        if kind == "top" and colon:
            return TopWithin(int(first), float(second))
    except ValueError:
        pass
    raise InvalidParameter("relaxed", text, _FORMS)


def check_leniency(rule: str, leniency: object) -> None:
    """Refuse what is no leniency, and one beside a rule that has no use for it."""
    if leniency is None:
        return
    if not isinstance(leniency, (Typical, TopWithin)):
        raise InvalidParameter("relaxed", leniency, f"None, Typical(...) or TopWithin(...); as text {_FORMS}")
    if rule != "relaxed":
        raise InvalidParameter("relaxed", str(leniency), f"nothing under the rule {rule!r}", "Use --verify relaxed.")
