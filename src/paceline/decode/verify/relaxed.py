"""Relaxed: `coupled`, and besides any draft the target finds likely enough. NOT lossless.

The text has not the target's distribution: drafts are favoured. Everything it gives says so (`Completion.lossless`,
the trace, the command line). What is likely enough: `leniency.py`. At temperature 0 only the argmax has probability,
so that text is plain greedy text.

In a tree the longest path whose drafts are all kept counts, of equally long ones the most probable under the target,
of equals the one listed first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.verify.leniency import Leniency, Typical

__all__ = ["likely_enough", "verify_relaxed"]


def verify_relaxed(
    proposal: Proposal,
    target_probs: Sequence[Any],  # 1 + nodes rows [vocab]; only rows on kept paths are asked for
    draws: Sequence[int],  # [1 + nodes] the target's own draws
    leniency: Leniency,
) -> Verdict:
    """Keeps a draft that equals the target's draw or is likely enough; then the target's draw follows."""
    reach: list[tuple[int, float] | None] = []  # of each node: length and log-probability of its path, if kept
    best, best_reach = None, (0, 0.0)
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        before = (0, 0.0) if parent is None else reach[parent]
        here = 0 if parent is None else 1 + parent
        reach.append(None)
        if before is None:
            continue
        row = target_probs[here]
        if draws[here] == token or likely_enough(row, token, leniency):
            reached = (before[0] + 1, before[1] + math.log(max(float(row[token]), 1e-300)))
            reach[node] = reached
            if reached > best_reach:
                best, best_reach = node, reached
    path = () if best is None else tuple(proposal.path_to(best))
    row_after = 0 if best is None else 1 + best
    leaf = best not in proposal.parents
    return Verdict(path, int(draws[row_after]), "bonus" if leaf else "recovered")


def likely_enough(row: Any, token: int, leniency: Leniency) -> bool:
    """Whether the target's row [vocab] finds the token likely enough; equals of the last of `count` tokens are in."""
    own = row[token]
    if own == 0:
        return False
    if isinstance(leniency, Typical):
        known = row[row > 0]
        entropy = float(-(known * known.log()).sum())
        return bool(own > min(leniency.epsilon, leniency.delta * math.exp(-entropy)))
    return bool((row > own).sum() < leniency.count and own >= row.max() - leniency.margin)
