"""Documents of tokens that can be searched for the longest matches of a suffix.

For a few context lengths ("levels") a hash table leads to the most recent place of each context, and each
place to the one before it, as in LZ77 matchers. A look-up walks from the longest level to the shortest and
takes the most recent places first, so its cost is bounded while long matches are never crowded out by
frequent short ones.

Guarantees: every place returned is a true match (hashes are checked); with fewer places than the limit, all
of them are returned. O(levels) work per token added, removed or looked up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.decode.draft.match import match_length

__all__ = ["Corpus", "Document", "Place"]


@dataclass(slots=True, eq=False)
class Document:
    """One text. `base` is the corpus-wide number of its first token; bases only grow."""

    tokens: list[int]
    base: int
    number: int
    links: list[list[int | None]]  # by level, by token: the earlier place of the same context
    dropped: bool = False
    standing: float = 0.5  # recent share of its first continuation tokens that came true
    indexed: int = field(default=0)


class Place(NamedTuple):
    """`match` tokens before `document.tokens[start]` equal the last ones of the suffix."""

    document: Document
    start: int
    match: int


class Corpus:
    """`levels`: ascending context lengths in tokens; matches shorter than the first are not found."""

    def __init__(self, levels: Seq[int]) -> None:
        assert list(levels) == sorted(set(levels)) and levels[0] >= 1, f"levels {levels} must ascend from 1"
        self.levels = tuple(levels)
        self.documents: list[Document] = []
        self.num_tokens = 0
        self.num_added = 0
        self._bases: list[int] = []
        self._next_base = 0
        self._heads: dict[int, int] = {}  # hash of a context -> its most recent place

    def add(self, tokens: list[int]) -> Document:
        """A new document. `tokens` is kept, not copied; `extend` takes in what is appended to it later.

        Only the newest document may grow.
        """
        document = Document(tokens, self._next_base, self.num_added, [[] for _ in self.levels])
        self.num_added += 1
        self.documents.append(document)
        self._bases.append(document.base)
        self.extend(document, tokens)
        return document

    def extend(self, document: Document, tokens: list[int]) -> None:
        """Takes in tokens appended to the newest document. A context enters once its next token is known."""
        assert document is self.documents[-1], "only the newest document may grow"
        document.tokens = tokens
        heads, base = self._heads, document.base
        for k, links in zip(self.levels, document.links, strict=True):
            links.extend([None] * (len(tokens) - len(links)))
            for after in range(max(k, document.indexed), len(tokens)):
                key = hash(tuple(tokens[after - k : after]))
                links[after] = heads.get(key)
                heads[key] = base + after
        self.num_tokens += len(tokens) - document.indexed
        document.indexed = len(tokens)
        self._next_base = base + len(tokens)

    def remove_oldest(self) -> Document:
        document = self.documents.pop(0)
        self._bases.pop(0)
        self.num_tokens -= document.indexed
        for k in self.levels:
            for after in range(k, document.indexed):
                key = hash(tuple(document.tokens[after - k : after]))
                if self._heads.get(key) == document.base + after:
                    del self._heads[key]
        return document

    def places(self, tokens: list[int], end: int, limit: int, max_match: int) -> list[Place]:
        """Up to `limit` places that match the end of `tokens[:end]`, the longest levels and newest first."""
        found: list[Place] = []
        known: set[int] = set()
        for level in range(len(self.levels) - 1, -1, -1):
            k = self.levels[level]
            if k > end:
                continue
            steps, number = 0, self._heads.get(hash(tuple(tokens[end - k : end])))
            while number is not None and len(found) < limit and steps < 2 * limit:
                document = self._document_of(number)
                if document is None:  # what links to a removed document is older still
                    break
                start = number - document.base
                if number not in known and not document.dropped:
                    known.add(number)
                    match = match_length(tokens, end, document.tokens, start, max_match)
                    if match >= k:
                        found.append(Place(document, start, match))
                number = document.links[level][start]
                steps += 1
        return found

    def _document_of(self, number: int) -> Document | None:
        index = bisect_right(self._bases, number) - 1
        return self.documents[index] if index >= 0 else None
