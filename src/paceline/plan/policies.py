"""Ways to choose draft lengths, run over replayed texts: what each would have done, and what that costs.

    plain          never draft
    NAME:D         the drafter NAME at draft length D
    auto           the controller, learning as it goes, through all texts in their order, over the drafters that the
                   engine's `auto` asks: of string matchers `suffix` alone, where the probe has it
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
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.from_probe import pass_steps
from paceline.plan.control.offline import OfflineText, Prices, Totals, run_offline
from paceline.plan.control.records import DrafterFacts, asked_by_auto
from paceline.plan.hindsight import Round, fixed_rounds, oracle_rounds, seconds_of
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import ProbeFile, ReplayedText

__all__ = ["AUTO", "ORACLE", "PLAIN", "Outcome", "default_policies", "run_policies"]

PLAIN, AUTO, ORACLE = "plain", "auto", "oracle"
_READING = 0.02  # of a draft step, for each token more that is read in it


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
    fixed = [f"{d.name}:{k}" for d in probe.drafters for k in lengths]
    return [PLAIN, *([AUTO] if fixed else []), *fixed, ORACLE]


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
        if name == AUTO:
            found.append(_controlled(_run_controller(probe, texts, table, batch), tokens, tokens * plain_s, bound))
            continue
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
        allowed = f"plain, auto, oracle, or NAME:D with NAME one of {', '.join(known)}"
        raise InvalidParameter("--controller", name, allowed)
    if int(length) > probe.longest:
        raise InvalidParameter("--controller", name, f"a draft length up to {probe.longest}, the longest replayed")
    return lambda text: fixed_rounds(text, drafter, int(length))


def _run_controller(probe: ProbeFile, texts: Sequence[ReplayedText], table: PassTable, batch: int) -> Totals:
    """The controller at one sequence whose rounds cost what those of `batch` alike ones do."""
    steps: dict[int, StepTimes] = {}
    for index, drafter in enumerate(probe.drafters):
        if drafter.steps:
            one = PassTable(drafter.steps).seconds(batch, 1)
            steps[index] = StepTimes((1, 101), (one, one * (1 + 100 * _READING)))
    asked = asked_by_auto([d.name for d in probe.drafters])
    free = [d.round_s * batch for d in probe.drafters if not d.steps and d.name in asked]
    seed = pass_steps(probe, batch)
    passes = StepTimes(seed.rows, seed.seconds)  # contexts are not priced here
    facts = [DrafterFacts(d.name, steps.get(i)) for i, d in enumerate(probe.drafters)]
    prices = Prices(LiveCost(passes, 1, 64), steps, sum(free) / len(free) if free else 0.0)
    offline = [
        OfflineText(
            {i: t.drafts[d.name] for i, d in enumerate(probe.drafters) if d.name in asked and d.name in t.drafts},
            t.prompt_tokens,
            t.tokens - 1,
            t.temperature,
        )
        for t in texts
    ]
    return run_offline(offline, Controller(facts, LiveCost(passes, 1, 64)), prices, 1, min(probe.longest, 15))


def _controlled(totals: Totals, tokens: int, plain: float, bound: float) -> Outcome:
    drafting = [r for r in totals.rounds if r.drafted]
    lengths = Counter(("drafts" if r.drafted else None, r.drafted) for r in totals.rounds)
    return Outcome(
        policy=AUTO,
        seconds=totals.seconds,
        tokens=tokens,
        over_plain=plain / totals.seconds,
        of_oracle=bound / totals.seconds,
        acceptance_length=statistics.fmean(r.emitted for r in drafting) if drafting else None,
        drafted=sum(r.drafted for r in totals.rounds),
        accepted=tokens - len(totals.rounds),
        lengths=dict(lengths),
    )


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
