"""Prompt lookup: what followed these last few tokens the last time they stood in the prompt or the output?

The longest suffix of the committed tokens (up to `max_ngram`, at least `min_ngram` long) that also stands
earlier is found, and what followed its most recent earlier place is proposed. Where that place is so near
that the text repeats itself with a period shorter than the budget, copying goes on round the loop, so output
that loops is drafted at full length.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
Guarantees: ids already in the sequence only; O(max_ngram) dictionary work per committed token and per
proposal.
Twin: `tests/drafters/drafter_twins.py::ngram_continuation` searches every position.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.match import copy_confidence, copy_from, match_length
from paceline.errors import InvalidParameter

__all__ = ["NgramDrafter"]

_CONFIDENCE_WINDOW = 16  # tokens of match that are looked at for the confidence; more say little more


@dataclass(slots=True)
class _Index:
    """Where each n-gram last ended, for the n-grams that end before the last committed token."""

    places: list[dict[tuple[int, ...], int]]  # by n - min_ngram: n-gram -> index of the token after it
    indexed: int = 0  # tokens whose n-grams are in `places`
    seen: int = 0  # tokens at the last `begin` or `observe`


class NgramDrafter:
    """See the module's docstring. `min_ngram` and `max_ngram` in tokens, 1 <= min_ngram <= max_ngram."""

    name = "ngram"
    needs = Needs()

    def __init__(self, min_ngram: int = 2, max_ngram: int = 8, min_path_prob: float = 0.1) -> None:
        if min_ngram < 1:
            raise InvalidParameter("min_ngram", min_ngram, "a whole number from 1")
        if max_ngram < min_ngram:
            raise InvalidParameter("max_ngram", max_ngram, f"a whole number from min_ngram ({min_ngram})")
        if not 0.0 <= min_path_prob < 1.0:
            raise InvalidParameter("min_path_prob", min_path_prob, "a number from 0 to below 1")
        self.min_ngram, self.max_ngram, self.min_path_prob = min_ngram, max_ngram, min_path_prob
        self._sequences: dict[int, _Index] = {}

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self._sequences, f"sequence {view.key} began twice"
        index = _Index([{} for _ in range(self.min_ngram, self.max_ngram + 1)])
        self._sequences[view.key] = index
        self._extend(index, view.tokens)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        for view in views:
            self._extend(self._sequences[view.key], view.tokens)

    def end(self, view: SequenceView) -> None:
        del self._sequences[view.key]

    def check_idle(self) -> None:
        assert not self._sequences, f"n-gram indexes held for sequences {sorted(self._sequences)}"

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Adds the n-grams that end before the last token: the suffix itself must not be found."""
        for end in range(index.indexed, len(tokens) - 1):
            after = end + 1
            for places, n in zip(index.places, range(self.min_ngram, self.max_ngram + 1), strict=True):
                if n > after:
                    break
                places[tuple(tokens[after - n : after])] = after
        index.indexed = max(index.indexed, len(tokens) - 1)
        index.seen = len(tokens)

    def _propose(self, view: SequenceView, budget: int) -> Proposal:
        index, tokens = self._sequences[view.key], view.tokens
        assert len(tokens) == index.seen, f"{len(tokens)} tokens committed, {index.seen} observed"
        start = self._find(index, tokens)
        if start is None or budget <= 0:
            return Proposal()
        match = match_length(tokens, len(tokens), tokens, start, max(budget, _CONFIDENCE_WINDOW))
        drafts = copy_from(tokens, start, budget, match)
        confidence = [copy_confidence(match + i) for i in range(len(drafts))]
        length = sum(chance >= self.min_path_prob for chance in accumulate(confidence, mul))
        return Proposal.chain(drafts[:length], self.name, confidence=tuple(confidence[:length]))

    def _find(self, index: _Index, tokens: list[int]) -> int | None:
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            start = index.places[n - self.min_ngram].get(tuple(tokens[-n:]))
            if start is not None:
                return start
        return None
