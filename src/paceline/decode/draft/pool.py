"""Finished outputs of earlier requests, to draft from in later ones of the same tenant.

What a pool of the past gets wrong in practice is that it is never cleaned: acceptance rots as stale text
crowds in. So entries leave when the pool is full (the oldest of the tenant that holds most), when they are
too old, and when what they suggest stops coming true.

Guarantees: committed tokens of ended requests only; nothing crosses tenants; at most `max_tokens` tokens in
all.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.decode.draft.corpus import Corpus, Place

__all__ = ["OutputPool"]

_LEARNING_RATE = 0.125
_WORST_STANDING = 0.1  # from the initial 0.5 reached by 13 misses in a row


class OutputPool:
    """max_tokens   over all tenants; 0 keeps nothing
    max_age      an output leaves once this many later ones of its tenant have been added
    levels       see `Corpus`
    """

    def __init__(self, max_tokens: int, max_age: int, levels: Seq[int]) -> None:
        self.max_tokens, self.max_age = max_tokens, max_age
        self._levels = tuple(levels)
        self._tenants: dict[str, Corpus] = {}

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self._tenants.values())

    def add(self, tenant: str, output: list[int]) -> None:
        """Takes a finished output in; what is longer than the whole pool keeps its end."""
        output = output[max(0, len(output) - self.max_tokens) :]
        if len(output) <= self._levels[0]:
            return
        corpus = self._tenants.setdefault(tenant, Corpus(self._levels))
        corpus.add(output)
        while corpus.num_added - 1 - corpus.documents[0].number >= self.max_age:
            corpus.remove_oldest()
        while self.num_tokens > self.max_tokens:
            fullest = max(self._tenants, key=lambda name: self._tenants[name].num_tokens)
            self._tenants[fullest].remove_oldest()
            if not self._tenants[fullest].documents:
                del self._tenants[fullest]

    def places(self, tenant: str, tokens: list[int], end: int, limit: int, max_match: int) -> list[Place]:
        """Matches of the end of `tokens[:end]` in the tenant's outputs; see `Corpus.places`."""
        corpus = self._tenants.get(tenant)
        return [] if corpus is None else corpus.places(tokens, end, limit, max_match)

    def score(self, tenant: str, tokens: list[int], end: int) -> None:
        """Now that `tokens[end]` is known: was the best match before it right? Drops what keeps missing."""
        for document, start, _ in self.places(tenant, tokens, end, limit=1, max_match=self._levels[-1]):
            hit = document.tokens[start] == tokens[end]
            document.standing += _LEARNING_RATE * (hit - document.standing)
            if document.standing < _WORST_STANDING:
                document.dropped = True
