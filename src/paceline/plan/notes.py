"""What a plan warns of: limits of the machine, of the engines, and of what was measured."""

from __future__ import annotations

import numpy as np

from paceline.plan.frontier import Answer, Candidate
from paceline.plan.scenario import Scenario

__all__ = ["plan_notes"]

MIN_GAIN = 1.03  # below this, speculation is not worth running: the model cannot tell it from nothing
_GRAPH_ROWS = 512  # rows past which engines of today stop capturing graphs by default


def plan_notes(
    candidates: list[Candidate], scenario: Scenario, answer: Answer, used: Candidate | None
) -> list[str]:
    """Warnings, most general first. `used` is the mechanism that the schedule is for."""
    found = _machine(candidates[0], scenario, answer)
    for c in candidates:
        if c.acceptance is not None:
            found += _acceptance(c, scenario, c is used)
    return found


def _machine(plain: Candidate, scenario: Scenario, answer: Answer) -> list[str]:
    best, grid, found = answer.best, plain.grid, []
    i = int(np.argmin(np.abs(grid.batches - best.batch)))
    delay = float(grid.batches[i] * grid.prefill_s[i, 0, 0])
    share = delay / (float(grid.plain_s[i, 0, 0]) + delay)
    if share > 0.5:
        found.append(
            f"prefill is the limit: {share:.0%} of the time at batch {best.batch} goes into reading prompts, "
            "which speculation does not speed up; chunked prefill, prefix caching or a prefill pool "
            "help more."
        )
    rows = best.batch * (1 + best.draft_length)
    if rows > _GRAPH_ROWS:
        found.append(
            f"{rows} rows a round lie past the {_GRAPH_ROWS} that engines capture as graphs by default; past "
            "them a step can cost several times more (measured: 20.6 to 104 ms). Raise the engine's capture "
            "size or measure."
        )
    if scenario.hardware.flops_per_s.get("int8", 1e15) < 2e14 and scenario.precision.linear == "int8":
        found.append(f"{scenario.hardware.title} multiplies int8 slowly; use fp8 or fp4 there.")
    return found


def _acceptance(c: Candidate, scenario: Scenario, used: bool) -> list[str]:
    assert c.acceptance is not None
    found, name = [], c.mechanism.label
    known = len(c.acceptance.at(scenario.load.mean_context))
    if used and int(c.grid.lengths[-1]) > known:
        found.append(f"{name}: acceptance is known to D = {known}; beyond it the last is held.")
    if c.acceptance.temperature == 0.0:
        found.append(f"{name}: acceptance measured at temperature 0; sampled traffic is accepted less often.")
    return found + _by_part(c)


def _by_part(c: Candidate) -> list[str]:
    """Kinds of traffic for which drafting does not pay, where the acceptance is a mixture."""
    assert c.acceptance is not None
    found = []
    row = len(c.grid.batches) // 2
    for share, part in c.acceptance.parts:
        lengths = part.lengths(int(c.grid.lengths[-1]), float(c.grid.contexts[0]))
        gain = float((lengths[c.grid.lengths.astype(int)] / c.grid.cost_ratio[row, :, 0]).max())
        if gain < MIN_GAIN:
            found.append(
                f"{c.mechanism.label}: {part.source} ({share:.0%} of tokens) gains nothing at batch "
                f"{int(c.grid.batches[row])}: run it without speculation."
            )
    return found
