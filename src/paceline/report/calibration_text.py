"""A calibration as text: what was fitted, how sure it is, and rows that do not belong to one smooth
machine.
"""

from __future__ import annotations

import math

from paceline.plan.calibrated import Calibrated
from paceline.report.plan_text import table

__all__ = ["calibration_text"]


def calibration_text(made: Calibrated) -> str:
    """Constants with their spread before and after, and the residual of each row."""
    c = made.calibration
    rows = [
        (name, f"x {math.exp(c.logs[name]):.2f}", f"+-{before:.0%}", f"+-{after:.0%}", _word(before, after))
        for name, (before, after) in c.surer().items()
    ]
    parts = [
        f"{c.rows} timings fitted, median error {c.median_error:.1%}, noise of one timing {c.noise:.1%}",
        table(("constant", "against prior", "before", "after", ""), rows),
        table(("batch", "D", "context", "predicted / measured rate"),
              [(f"{t.batch:g}", t.draft_length, "load's" if t.context is None else f"{t.context:.0f}",
                f"{math.exp(r):.3f}") for t, r in zip(made.timings, made.fit.residuals, strict=True)]),
    ]  # fmt: skip
    if c.survival_fit:
        s, r = c.survival_fit
        parts.append(
            f"acceptance was not measured; fitted: {s:.2f} at the first position, falling by {r:.2f} each: "
            "measure it, since it cannot be told from the fixed cost of drafting."
        )
    if c.cliff:
        parts.append(
            f"a cliff from batch {c.cliff[0]:g} on: rounds with drafts take {c.cliff[1]:.1f} times what "
            "the batches below "
            "allow. Only those below were fitted; look for a graph size or a scheduler limit, and "
            "measure again."
        )
    for t in made.cliffs:
        parts.append(
            f"a cliff at batch {t.batch:g}, D = {t.draft_length}: over 25 % slower than the rest "
            "allows; left out "
            "of the fit. Look for a graph size or a scheduler limit there."
        )
    return "\n\n".join(parts)


def _word(before: float, after: float) -> str:
    return (
        "now known" if after < before / 2 else "better known" if after < 0.8 * before else "not told by these"
    )
