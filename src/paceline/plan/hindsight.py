"""Rounds that a replayed text would have taken: any fixed draft length, and the best that hindsight allows.

All of it is exact under `greedy` and `coupled`, where the text is the same whoever drafts: a round that begins at
position i with k drafts of one drafter emits min(matched[i], k) + 1 tokens. (One assumption: a drafter asked for k
drafts gives the first k of those it gives when asked for more. `suffix` weighs paths by the length asked for and can
differ.)

The oracle knows every accepted length beforehand, so it never drafts in vain, and it places its rounds so that the
whole text takes least: the bound of arXiv 2601.11580 by dynamic programming over positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.plan.probe_file import Drafts, ReplayedText

__all__ = ["Round", "best_fixed_seconds", "fixed_rounds", "oracle_rounds", "reach", "seconds_of"]

RoundCost = Callable[[int], float]  # drafts verified -> seconds of the round


@dataclass(frozen=True, slots=True)
class Round:
    """position    of the text at which it begins
    drafter     who drafted; None where nobody did
    drafted     tokens verified beside the target's own
    accepted    of these
    """

    position: int
    drafter: str | None
    drafted: int
    accepted: int


def fixed_rounds(text: ReplayedText, drafter: str, length: int) -> list[Round]:
    """The rounds of one drafter at draft length `length`; 0 is plain decoding."""
    drafts = text.drafts[drafter]
    rounds: list[Round] = []
    position, positions = 0, text.tokens - 1
    while position < positions:
        drafted = min(length, drafts.proposed[position])
        accepted = min(drafted, drafts.matched[position])
        rounds.append(Round(position, drafter if drafted else None, drafted, accepted))
        position += accepted + 1
    return rounds


def oracle_rounds(text: ReplayedText, plain_s: float, costs: Mapping[str, RoundCost]) -> list[Round]:
    """The quickest rounds over the text when every accepted length is known beforehand.

    plain_s   seconds of a round without drafts
    costs     by drafter: seconds of a round with so many drafts of it
    """
    positions = text.tokens - 1
    best = [0.0] * (positions + 1)
    chosen: list[Round] = []
    prices = {name: [cost(k) for k in range(_longest(text.drafts[name]) + 1)] for name, cost in costs.items()}
    for position in range(positions - 1, -1, -1):
        pick, seconds = Round(position, None, 0, 0), plain_s + best[position + 1]
        for name, price in prices.items():
            for k in range(1, text.drafts[name].matched[position] + 1):
                other = price[k] + best[min(position + k + 1, positions)]
                if other < seconds:
                    pick, seconds = Round(position, name, k, k), other
        best[position] = seconds
        chosen.append(pick)
    chosen.reverse()
    rounds: list[Round] = []
    position = 0
    while position < positions:
        rounds.append(chosen[position])
        position += chosen[position].accepted + 1
    return rounds


def _longest(drafts: Drafts) -> int:
    return max(drafts.matched, default=0)


def seconds_of(rounds: Iterable[Round], plain_s: float, costs: Mapping[str, RoundCost]) -> float:
    """The rounds at these prices."""
    counts = Counter((r.drafter, r.drafted) for r in rounds)
    return sum(n * (plain_s if name is None else costs[name](k)) for (name, k), n in counts.items())


def best_fixed_seconds(
    texts: Sequence[ReplayedText], plain_s: float, costs: Mapping[str, RoundCost], longest: int
) -> tuple[float, str | None, int]:
    """(seconds, drafter, D) of the fixed setting with the least total time over `texts`; plain is one of them."""
    best = (sum(t.tokens - 1 for t in texts) * plain_s, None, 0)
    found: list[tuple[float, str | None, int]] = [best]
    for name, cost in costs.items():
        for length in range(1, longest + 1):
            total = sum(seconds_of(fixed_rounds(t, name, length), plain_s, {name: cost}) for t in texts)
            found.append((total, name, length))
    return min(found, key=lambda setting: setting[0])


def reach(drafts: Iterable[Drafts], longest: int) -> tuple[list[int], list[int], list[int]]:
    """By depth 1 to `longest`, over all positions: (offered that deep with all before it matched, matched, offered).

    The first two make the conditional acceptance; the third over the positions is how often the drafter speaks.
    """
    tried, kept, offered = [0] * longest, [0] * longest, [0] * longest
    for one in drafts:
        for proposed, matched in zip(one.proposed, one.matched, strict=True):
            for depth in range(min(proposed, longest)):
                offered[depth] += 1
                tried[depth] += matched >= depth
                kept[depth] += matched > depth
    return tried, kept, offered
