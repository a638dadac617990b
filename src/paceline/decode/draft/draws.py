"""With which noise a drafter draws, and whether it has to say what it drew from: the acceptance rule decides.

For drafters that sample. Siblings of a tree are drawn without replacement: the first to arrive in the race of one
key, in that order.
"""

from __future__ import annotations

from paceline.decode.draft.base import SequenceView
from paceline.decode.verify.noise import Purpose, position_key

__all__ = ["draft_key", "reports_probs"]


def draft_key(view: SequenceView, position: int) -> int:
    """The key of the noise that draws the draft of an absolute position.

    The target's own where the rule shares it. Else one for drafts alone that is new in every round: whatever was
    learnt of drafts that were thrown away then says nothing about the next ones.
    """
    if view.rule.shares_noise:
        return position_key(view.noise_key, position, Purpose.TARGET)
    return position_key(view.noise_key, position, Purpose.DRAFT, len(view.tokens))


def reports_probs(view: SequenceView) -> bool:
    """Whether the rule looks at what drafts were drawn from; at temperature 0 they are certain, and one-hot."""
    return not view.rule.shares_noise and not view.params.greedy
