"""Ways to choose draft lengths, run over replayed texts: what each would have done, and what that costs.

    plain          never draft
    NAME:D         the drafter NAME at draft length D
    oracle         every accepted length known beforehand: the bound (`hindsight.py`)

Prices are those of rounds in which `batch` alike sequences run together.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidParameter
from paceline.plan.advice import draft_costs
from paceline.plan.hindsight import Round, fixed_rounds, oracle_rounds, seconds_of
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import ProbeFile, ReplayedText

__all__ = ["ORACLE", "PLAIN", "Outcome", "default_policies", "run_policies"]

PLAIN, ORACLE = "plain", "oracle"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy over all texts.

    seconds, tokens       of decode rounds, the token of the prefill left out
    over_plain            plain seconds over its seconds
    of_oracle             share of the bound's speed
    acceptance_length     tokens of a drafting round; None where nothing was drafted
    drafted, accepted     draft tokens
    lengths               (drafter, drafts) -> rounds; (None, 0) are plain ones
    """

    policy: str
    seconds: float
    tokens: int
    over_plain: float
    of_oracle: float
    acceptance_length: float | None
    drafted: int
    accepted: int
    lengths: dict[tuple[str | None, int], int]

    @property
    def rounds(self) -> int:
        return sum(self.lengths.values())

    @property
    def mean_length(self) -> float:
        return statistics.fmean(k for (_, k), n in self.lengths.items() for _ in range(n)) if self.lengths else 0.0


def default_policies(probe: ProbeFile) -> list[str]:
    """Plain, each drafter at a few lengths, and the bound."""
    lengths = [d for d in (1, 2, 4, 8, 16) if d <= probe.longest]
    return [PLAIN, *(f"{d.name}:{k}" for d in probe.drafters for k in lengths), ORACLE]


def run_policies(probe: ProbeFile, names: Sequence[str], batch: int = 1) -> list[Outcome]:
    """Every policy over every text of the probe. Raises InvalidParameter for a name that is none."""
    texts = [t for t in probe.texts if t.tokens > 1]
    if not texts:
        raise InvalidParameter("texts", 0, "one or more answers of two tokens or more")
    table = PassTable(probe.passes)
    costs, plain_s = draft_costs(probe, table, batch), table.seconds(batch, 1)
    tokens = sum(t.tokens - 1 for t in texts)
    bound = sum(seconds_of(oracle_rounds(t, plain_s, costs), plain_s, costs) for t in texts)
    found = []
    for name in names:
        choose = _policy(name, probe, costs, plain_s)
        rounds = [r for text in texts for r in choose(text)]
        seconds = seconds_of(rounds, plain_s, costs)
        found.append(_outcome(name, rounds, seconds, tokens, tokens * plain_s, bound))
    return found


def _policy(
    name: str, probe: ProbeFile, costs: dict[str, Callable[[int], float]], plain_s: float
) -> Callable[[ReplayedText], list[Round]]:
    if name == PLAIN:
        return lambda text: [Round(i, None, 0, 0) for i in range(text.tokens - 1)]
    if name == ORACLE:
        return lambda text: oracle_rounds(text, plain_s, costs)
    drafter, _, length = name.rpartition(":")
    known = [d.name for d in probe.drafters]
    if drafter not in known or not length.isdigit():
        allowed = f"plain, oracle, or NAME:D with NAME one of {', '.join(known)}"
        raise InvalidParameter("--controller", name, allowed)
    if int(length) > probe.longest:
        raise InvalidParameter("--controller", name, f"a draft length up to {probe.longest}, the longest replayed")
    return lambda text: fixed_rounds(text, drafter, int(length))


def _outcome(
    name: str, rounds: Sequence[Round], seconds: float, tokens: int, plain: float, bound: float
) -> Outcome:
    drafting = [r for r in rounds if r.drafted]
    return Outcome(
        policy=name,
        seconds=seconds,
        tokens=tokens,
        over_plain=plain / seconds,
        of_oracle=bound / seconds,
        acceptance_length=statistics.fmean(r.accepted + 1 for r in drafting) if drafting else None,
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        lengths=dict(Counter((r.drafter, r.drafted) for r in rounds)),
    )
