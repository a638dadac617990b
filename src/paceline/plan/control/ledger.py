"""The books of the controller: time saved against the plain decoding that was not run, and drafters of no use.

A round of n sequences that emits e_i tokens saves sequence i  e_i * plain - round  seconds, both at the fitted
cost of that moment (so that a stall of the machine is nobody's loss) and the time spent on drafters as measured.
The engine as a whole saves mean(e) * plain - round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.plan.control.records import DraftAlarm, DrafterFacts
from paceline.plan.control.survival import AcceptanceTable

__all__ = ["Ledger"]

_ENOUGH = 100.0  # outcomes before a drafter is called useless
_FREE_NEEDS = 0.02  # first drafts of a string matcher that must come true


class Ledger:
    """saved_s    seconds saved so far, all sequences together (of the machine's time)
    plain_s    seconds that plain decoding would have taken for the same tokens
    draft_s    seconds spent on drafters
    alarms     drafters of no use, each once
    """

    def __init__(self, drafters: Seq[DrafterFacts], tables: Seq[AcceptanceTable]) -> None:
        self._drafters, self._tables = drafters, tables
        self.saved_s = self.plain_s = self.draft_s = 0.0
        self.rounds = 0
        self.alarms: list[DraftAlarm] = []

    def add(self, emitted: Seq[int], plain_s: float, round_s: float, draft_s: float) -> list[float]:
        """Book a round; the seconds it saved each of its sequences."""
        if not emitted:
            return []
        self.rounds += 1
        self.draft_s += draft_s
        would = sum(emitted) / len(emitted) * plain_s
        self.plain_s += would
        self.saved_s += would - round_s
        if self.rounds % 32 == 0:
            self._look_for_useless(plain_s)
        return [e * plain_s - round_s for e in emitted]

    def _look_for_useless(self, plain_s: float) -> None:
        for facts, table in zip(self._drafters, self._tables, strict=True):
            outcomes = table.outcomes(0)
            if outcomes < _ENOUGH or any(alarm.drafter == facts.name for alarm in self.alarms):
                continue
            needed = _FREE_NEEDS if facts.steps is None else max(_FREE_NEEDS, facts.steps.at(1) / plain_s)
            acceptance = table.acceptance()
            if acceptance < needed:
                self.alarms.append(DraftAlarm(facts.name, acceptance, needed, int(outcomes)))
