"""The books of the controller: time saved against the plain decoding that was not run, and drafters of no use.

Of the engine as a whole: what plain decoding of the same tokens would have taken (`shadow.py`), less the rounds that
were run. Of a sequence, while it runs: a round of n sequences that emits e_i tokens saves it  e_i * plain - round
seconds. All at the fitted cost of that moment, so that a stall of the machine is nobody's loss, and the time spent on
drafters as measured.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.plan.control.cost import LiveCost
from paceline.plan.control.records import DraftAlarm, DrafterFacts, RoundFacts
from paceline.plan.control.shadow import PlainShadow
from paceline.plan.control.survival import AcceptanceTable

__all__ = ["Ledger"]

_ENOUGH = 100.0  # outcomes before a drafter is called useless
_FREE_NEEDS = 0.02  # first drafts of a string matcher that must come true


class Ledger:
    """draft_s    seconds spent on drafters
    alarms     drafters of no use, each once
    """

    def __init__(self, drafters: Seq[DrafterFacts], tables: Seq[AcceptanceTable], cost: LiveCost) -> None:
        self._drafters, self._tables = drafters, tables
        self._shadow = PlainShadow(cost)
        self._run_s = self.draft_s = 0.0
        self.rounds = 0
        self.alarms: list[DraftAlarm] = []

    @property
    def plain_s(self) -> float:
        """Seconds that plain decoding would have taken for the same tokens."""
        return self._shadow.seconds

    @property
    def saved_s(self) -> float:
        """Seconds of the machine saved so far."""
        return self.plain_s - self._run_s

    def add(self, facts: RoundFacts, plain_s: float, round_s: float) -> list[float]:
        """Book a round that took `round_s`, and plain `plain_s`; the seconds it saved each of its sequences.

        Of a round that read prompts, what it took more than plain decoding of a token each beside the same prompts.
        """
        self.draft_s += facts.draft_s
        self._run_s += round_s
        if not facts.emitted:
            return []
        self.rounds += 1
        self._shadow.add(facts.keys, facts.contexts, facts.emitted, facts.prefill)
        if self.rounds % 32 == 0:
            self._look_for_useless(plain_s)
        return [(e - facts.prefill) * plain_s - round_s for e in facts.emitted]

    def rest(self) -> None:
        """No sequence is left."""
        self._shadow.rest()

    def _look_for_useless(self, plain_s: float) -> None:
        for facts, table in zip(self._drafters, self._tables, strict=True):
            outcomes = table.outcomes(0)
            if outcomes < _ENOUGH or any(alarm.drafter == facts.name for alarm in self.alarms):
                continue
            needed = _FREE_NEEDS if facts.steps is None else max(_FREE_NEEDS, facts.steps.at(1) / plain_s)
            acceptance = table.acceptance()
            if acceptance < needed:
                self.alarms.append(DraftAlarm(facts.name, acceptance, needed, int(outcomes)))
