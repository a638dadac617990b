"""The plain decoding that is not run, as a simulation beside what is: what would its rounds have taken?

The same sequences in the same order at the same places, each emitting a token a round. Which of them would share a
round is not which do: who drafts well ends early here, and would have stayed beside the others there. So the shadow
lags, and decodes a token once the engine has it; what it has not decoded yet is reckoned when somebody asks, and
run when the engine rests. Its places are as many as were taken at once since the last rest. Prompts are left out, as
they cost the same, and so is one token of each sequence in the rounds that read them: plain decoding would have put it
beside the prompt too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

from paceline.plan.control.cost import LiveCost

__all__ = ["PlainShadow"]


@dataclass(slots=True)
class _Run:
    """A sequence: tokens before its first round here, tokens that the engine emitted, and that the shadow did."""

    context: int
    emitted: int = 0
    decoded: int = 0
    ended: bool = False


class PlainShadow:
    """`cost` prices a round at the time at which the shadow runs it. `seconds` may be asked from any thread."""

    def __init__(self, cost: LiveCost) -> None:
        self._cost = cost
        self._runs: dict[int, _Run] = {}  # by key, in the order of their first rounds
        self._places, self._seconds = 1, 0.0
        self._lock = threading.Lock()

    def add(self, keys: Seq[int], contexts: Seq[int], emitted: Seq[int], beside_prompt: bool = False) -> None:
        """A round of the engine: sequences, tokens of each before it, and tokens each emitted. Who is not in it any
        more has ended."""
        with self._lock:
            for run in self._runs.values():
                run.ended = True
            for key, context, tokens in zip(keys, contexts, emitted, strict=True):
                if key not in self._runs:
                    self._runs[key] = _Run(context)
                run = self._runs[key]
                run.emitted, run.ended = run.emitted + max(tokens - beside_prompt, 0), False
            self._places = max(self._places, len(keys))
            self._seconds += self._decode(self._runs)

    def rest(self) -> None:
        """No sequence is left: those here end, and do not share rounds with what comes later."""
        with self._lock:
            for run in self._runs.values():
                run.ended = True
            self._seconds += self._decode(self._runs)
            self._places = 1

    @property
    def seconds(self) -> float:
        """Of all tokens emitted so far, as if no more came."""
        with self._lock:
            settled, left = self._seconds, {key: replace(run, ended=True) for key, run in self._runs.items()}
        return settled + self._decode(left)

    def _decode(self, runs: dict[int, _Run]) -> float:
        """Run what can be run; the seconds it takes. Several rounds of the same sequences are priced in the middle."""
        seconds, cost = 0.0, self._cost
        while runs:
            beside = list(islice(runs.items(), self._places))
            if rounds := min([run.emitted - run.decoded for _, run in beside]):
                middles = [run.context + run.decoded + rounds // 2 for _, run in beside]
                keys = cost.all_keys([1] * len(beside), middles)
                seconds += rounds * cost.seconds(len(beside), keys, len(beside))
            waits = False  # for the engine
            for key, run in beside:
                run.decoded += rounds
                if run.decoded == run.emitted:
                    if run.ended:
                        del runs[key]
                    else:
                        waits = True
            if waits:
                break
        return seconds
