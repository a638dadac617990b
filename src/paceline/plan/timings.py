"""Measured speeds, and the cost model as a function of its constants over exactly those points.

A `Timing` is one row: batch, draft length, context, and a round time or a throughput, with the acceptance
length where it was measured. `Ledger` counts the work of all rows once; pricing it under new constants is
cheap, so fits and bands need no further modelling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter
from paceline.plan.constants import Constants
from paceline.plan.cost import Work, count_work, price
from paceline.plan.mechanisms import Mechanism, draft_works
from paceline.plan.rounds import prefill_works, prompts_together
from paceline.plan.scenario import Scenario

__all__ = ["Ledger", "Timing"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement. Exactly one of `round_s` (seconds a round) and `tokens_per_s` (all users together).

    batch               requests in flight on one replica
    context             mean cached tokens; None takes the load's
    acceptance_length   tokens a round emitted; None where not measured (then D > 0 rows inform it, too)
    """

    batch: float
    draft_length: int
    round_s: float | None = None
    tokens_per_s: float | None = None
    acceptance_length: float | None = None
    context: float | None = None

    def __post_init__(self) -> None:
        if (self.round_s is None) == (self.tokens_per_s is None):
            raise InvalidParameter("timing", self, "one of round_s and tokens_per_s")
        value = self.round_s if self.round_s is not None else self.tokens_per_s
        if not (value is not None and np.isfinite(value) and value > 0):
            raise InvalidParameter("timing", value, "a positive time or rate")
        if not self.batch >= 1 or self.draft_length < 0:
            raise InvalidParameter(
                "timing", (self.batch, self.draft_length), "batch from 1, draft length from 0"
            )
        al = self.acceptance_length
        if al is not None and not 1 <= al <= 1 + self.draft_length:
            raise InvalidParameter(
                "acceptance length", al, f"1 to {1 + self.draft_length} at draft length {self.draft_length}"
            )


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counted work of some points, paired arrays [rows]."""

    batch: Array
    draft_length: Array
    rounds: Array  # fixed costs of a speculative round
    target: list[Work]
    draft: list[tuple[list[Work], Array, Array]]  # works, passes [rows], serial steps [rows]
    prefill: list[list[Work]]
    together: Array
    output_tokens: float

    @classmethod
    def of(
        cls, scenario: Scenario, mechanism: Mechanism, batch: Sequence[float] | Array,
        draft_length: Sequence[float] | Array, context: Sequence[float] | Array,
    ) -> Ledger:  # fmt: skip
        b, d = np.asarray(batch, dtype=np.float64), np.asarray(draft_length, dtype=np.float64)
        ctx = np.asarray(context, dtype=np.float64)
        s, c = scenario, scenario.priced_by
        target = count_work(s.shape, s.hardware, b, mechanism.widths(d), ctx, s.precision, s.layout, c)
        prefill = prefill_works(s, None, b)
        together = prompts_together(s.load.prompt_tokens, b)
        drafts, rounds = draft_works(mechanism, s, b, d, ctx), mechanism.rounds(b, d)
        return cls(b, d, rounds, target, drafts, prefill, together, s.load.output_tokens)

    def round_s(self, c: Constants) -> Array:
        """Seconds a round, [rows]."""
        no_host = dataclasses.replace(c, host_s=0.0, row_s=0.0)
        seconds = price(self.target, c).total_s + self.rounds * c.round_s
        for works, passes, steps in self.draft:
            each = price(works, no_host).total_s if works else 0.0
            seconds = seconds + passes * each + steps * c.draft_step_s
        return np.asarray(seconds * np.ones_like(self.batch))

    def tokens_per_s(self, c: Constants, tokens: Array) -> Array:
        """Throughput of a replica, [rows], prefill included."""
        read = np.zeros_like(self.batch)
        for work in self.prefill:
            read = read + price(work, c).total_s / self.together
        delay = c.prefill * read / self.output_tokens
        return np.asarray(self.batch * tokens / (self.round_s(c) + self.batch * tokens * delay))
