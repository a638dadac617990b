"""What the string-matching drafters share: how long a match is, what follows it, how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["copy_confidence", "copy_doubt", "copy_from", "match_length", "shared_length"]

DOUBT = 2.0  # pseudo-count of "something else" after a match of one token; see `copy_confidence`


def match_length(
    tokens: list[int],
    end: int,  # the suffix is tokens[:end]
    other: list[int],
    start: int,  # the place is before other[start]
    limit: int,
) -> int:
    """How many tokens before `other[start]` equal the last ones of `tokens[:end]`, at most `limit`."""
    limit = min(limit, end, start)
    if tokens[end - limit : end] == other[start - limit : start]:
        return limit
    length = 0
    while tokens[end - 1 - length] == other[start - 1 - length]:
        length += 1
    return length


def copy_from(tokens: list[int], start: int, budget: int, match: int) -> list[int]:
    """`tokens` from `start` on, up to `budget`; round the loop where the match covers a whole period."""
    drafts = tokens[start : start + budget]
    period = len(tokens) - start
    if match >= period:
        while len(drafts) < budget:
            drafts.append(drafts[-period])
    return drafts


def copy_confidence(match: int, agree: int = 1, seen: int = 1) -> float:
    """Chance that `agree` of `seen` places with a common context of `match` tokens tell the next token.

    The doubt shrinks with the length of the context, so that one place of a short one claims little.
    Calibration is measured by `bench/replay_drafters.py`.
    """
    return agree / (seen + DOUBT / match)


def copy_doubt(match: int, seen: int) -> float:
    """What `copy_confidence` leaves for other tokens when all of the `seen` places have spoken."""
    return 1.0 - seen / (seen + DOUBT / match)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning of two lists, by halving: slices compare at machine speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
