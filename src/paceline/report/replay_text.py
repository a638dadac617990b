"""What policies would have done over replayed texts, as text."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.policies import Outcome
from paceline.plan.probe_file import ProbeFile, short_name
from paceline.report.plan_text import table

__all__ = ["replay_text"]

_SHOWN = 4


def replay_text(probe: ProbeFile, outcomes: Sequence[Outcome], batch: int) -> str:
    """A line a policy, and how often it drafted how far."""
    texts = [t for t in probe.texts if t.tokens > 1]
    head = f"{probe.model}: {len(texts)} texts, {sum(t.tokens - 1 for t in texts)} tokens of rounds, {batch} at once"
    rows = [
        (
            _name(o.policy), f"{o.seconds:.2f}", f"{o.tokens * batch / o.seconds:.1f}", f"{o.over_plain:.2f}",
            f"{100 * o.of_oracle:.0f} %", "" if o.acceptance_length is None else f"{o.acceptance_length:.2f}",
            f"{o.mean_length:.2f}", _often(o),
        )
        for o in outcomes
    ]  # fmt: skip
    columns = ("controller", "seconds", "tokens/s", "over plain", "of the best", "AL", "mean D", "mostly")
    return head + "\n" + table(columns, rows)


def _name(policy: str) -> str:
    drafter, colon, length = policy.rpartition(":")
    return f"{short_name(drafter)}:{length}" if colon and length.isdigit() else policy


def _often(o: Outcome) -> str:
    most = sorted(o.lengths.items(), key=lambda item: -item[1])[:_SHOWN]
    said = (("plain" if n is None else f"{short_name(n)} {k}", c) for (n, k), c in most)
    return ", ".join(f"{what} {100 * c / o.rounds:.0f} %" for what, c in said)
