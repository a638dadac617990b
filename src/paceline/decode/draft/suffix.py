"""Suffix decoding: go on as this request, or earlier finished ones of its tenant, went on from here before.

All places where the last tokens stood before are gathered, with the length of their match. Each minimum
length of match gives one candidate: the path on which most of the places agree, token by token, with the
chance of each token from how many agree. Proposed is the candidate with the most expected accepted tokens
(the sum of its path probabilities); a short match may not speak for long, nor an improbable path.
Where the request asks for a tree, all places speak at once: a token's chance comes from the longest matches, and
what they leave in doubt goes to the shorter ones (as in prediction by partial matching, Cleary and Witten 1984);
the tree is grown best-first by path probability.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975), with two changes: counts come from the most recent
matches instead of from all, which bounds the cost and lets old habits fade; and probabilities are smoothed by
the length of the match, so that a single place does not claim certainty.
Guarantees: ids already in the prompt, the output or the tenant's pool only; the pool as `OutputPool` says.
Twins: `tests/drafters/drafter_twins.py::suffix_chain` and `suffix_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.corpus import Corpus, Document, Place
from paceline.decode.draft.grow import grow
from paceline.decode.draft.match import copy_confidence, copy_doubt, copy_from
from paceline.decode.draft.pool import OutputPool
from paceline.errors import InvalidParameter

__all__ = ["Chain", "SuffixDrafter", "SuffixOptions", "best_chain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions:
    """min_match         shortest context that may speak, tokens, >= 1
    max_match         longer matches count as this long (or as the budget where that is more), >= min_match
    max_spec_factor   a match of m tokens may propose at most max_spec_factor * m + max_spec_offset tokens
    max_spec_offset
    min_token_prob    the path ends where its probability falls below this, in [0, 1)
    min_node_prob     a tree holds no node whose path is less probable, in [0, 1)
    max_places        matches looked at, in the request and again in the pool, >= 1
    max_pool_tokens   finished output kept for later requests, over all tenants, >= 0
    max_pool_age      finished outputs of its tenant after which one is forgotten, >= 1
    """

    min_match: int = 1
    max_match: int = 32
    max_spec_factor: float = 1.0
    max_spec_offset: float = 2.0
    min_token_prob: float = 0.1
    min_node_prob: float = 0.1
    max_places: int = 8
    max_pool_tokens: int = 65_536
    max_pool_age: int = 512

    def __post_init__(self) -> None:
        for name, low in (("min_match", 1), ("max_places", 1), ("max_pool_tokens", 0), ("max_pool_age", 1)):
            if getattr(self, name) < low:
                raise InvalidParameter(name, getattr(self, name), f"a whole number from {low}")
        if self.max_match < self.min_match:
            raise InvalidParameter("max_match", self.max_match, f"at least min_match ({self.min_match})")
        for name in ("min_token_prob", "min_node_prob"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InvalidParameter(name, getattr(self, name), "a number from 0 to below 1")
        if self.max_spec_factor < 0.0:
            raise InvalidParameter("max_spec_factor", self.max_spec_factor, "a number from 0")

    @property
    def levels(self) -> tuple[int, ...]:
        """Context lengths that are indexed: `min_match` and its doublings up to 4 times it."""
        lengths = (self.min_match, 2 * self.min_match, 4 * self.min_match)
        return tuple(k for k in lengths if k <= self.max_match)


@dataclass(frozen=True, slots=True)
class Chain:
    """A path, the chance of each token given those before it, and the expected accepted tokens."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    expected: float = 0.0


class SuffixDrafter:
    """See the module's docstring."""

    name = "suffix"
    needs = Needs(trees=True)

    def __init__(self, options: SuffixOptions | None = None) -> None:
        self.options = options or SuffixOptions()
        self.pool = OutputPool(self.options.max_pool_tokens, self.options.max_pool_age, self.options.levels)
        self._sequences: dict[int, tuple[Corpus, Document]] = {}

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self._sequences, f"sequence {view.key} began twice"
        corpus = Corpus(self.options.levels)
        self._sequences[view.key] = (corpus, corpus.add(view.tokens))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        for view in views:
            corpus, document = self._sequences[view.key]
            if document.indexed < len(view.tokens):
                self.pool.score(view.tenant, view.tokens, document.indexed)
                corpus.extend(document, view.tokens)

    def end(self, view: SequenceView) -> None:
        _, document = self._sequences.pop(view.key)
        if view.preempted:
            return
        self.pool.add(view.tenant, view.tokens[view.prompt_len : document.indexed])

    def check_idle(self) -> None:
        assert not self._sequences, f"suffix indexes held for sequences {sorted(self._sequences)}"
        held, allowed = self.pool.num_tokens, self.options.max_pool_tokens
        assert held <= allowed, f"the pool holds {held} tokens of {allowed}"

    def _propose(self, view: SequenceView, budget: int) -> Proposal:
        corpus, document = self._sequences[view.key]
        end = len(view.tokens)
        assert document.indexed == end, f"{end} tokens committed, {document.indexed} observed"
        if budget <= 0:
            return Proposal()
        limit, max_match = self.options.max_places, max(self.options.max_match, budget)
        places = corpus.places(view.tokens, end, limit, max_match)
        places += self.pool.places(view.tenant, view.tokens, end, limit, max_match)
        if view.tree_size is not None:
            return self._tree(places, document, budget, view.tree_size)
        chain = best_chain(places, document, budget, self.options)
        if not chain.tokens:
            return Proposal()
        return Proposal.chain(chain.tokens, self.name, confidence=chain.confidence)

    def _tree(self, places: list[Place], own: Document, depth: int, size: int) -> Proposal:
        options = self.options
        ranked = sorted(places, key=lambda place: -place.match)
        nodes = grow(lambda path: _chances(ranked, own, path, options), depth, size, options.min_node_prob)
        if not nodes:
            return Proposal()
        tokens, parents, chances = zip(*nodes, strict=True)
        return Proposal(tokens, parents, drafter=self.name, confidence=chances)


def best_chain(places: Seq[Place], own: Document, budget: int, options: SuffixOptions) -> Chain:
    """The chain with the most expected accepted tokens. A branching proposal starts from the same places.

    Candidates: the places that match at least m tokens, for the longest m and then for every m found that is
    at most half the last one (more of them hardly ever change the choice).
    """
    best = Chain()
    ranked = sorted(places, key=lambda place: -place.match)  # stable: the newest first among equals
    threshold: float = float("inf")
    for index, place in enumerate(ranked):
        if place.match > threshold:
            continue
        match, threshold = place.match, place.match / 2
        count = index + 1
        while count < len(ranked) and ranked[count].match == match:
            count += 1
        length = min(budget, int(options.max_spec_factor * match + options.max_spec_offset))
        chain = _majority_path(ranked[:count], own, match, length, options.min_token_prob)
        if chain.expected > best.expected:
            best = chain
    return best


def _majority_path(places: Seq[Place], own: Document, match: int, length: int, min_prob: float) -> Chain:
    """Token by token what most places agree on, up to `length` tokens; of equals the first."""
    ahead = [_continuation(place, own, length) for place in places]
    tokens: list[int] = []
    confidence: list[float] = []
    expected, path_prob = 0.0, 1.0
    for depth in range(length):
        ahead = [text for text in ahead if len(text) > depth]
        if not ahead:
            break
        said = [text[depth] for text in ahead]
        winner, agree = said[0], said.count(said[0])
        if agree < len(said):
            for token in dict.fromkeys(said):
                if said.count(token) > agree:
                    winner, agree = token, said.count(token)
        chance = copy_confidence(match + depth, agree, len(said))
        path_prob *= chance
        if path_prob < min_prob:
            break
        expected += path_prob
        tokens.append(winner)
        confidence.append(chance)
        if agree < len(said):
            ahead = [text for text in ahead if text[depth] == winner]
    return Chain(tuple(tokens), tuple(confidence), expected)


def _continuation(place: Place, own: Document, length: int) -> list[int]:
    """What stands from the place on, up to `length` tokens; past the end of the own text, round its loop."""
    return copy_from(place.document.tokens, place.start, length, place.match if place.document is own else 0)


def _chances(
    places: Seq[Place], own: Document, path: tuple[int, ...], options: SuffixOptions
) -> list[tuple[int, float]]:
    """What may follow `path` by the places (longest match first) at which it stands, with the chance of each.

    The places that match at least m tokens tell their share for the longest m; the rest is told by the next
    group, as in `best_chain`.
    """
    votes: list[tuple[int, int]] = []  # match, token
    for place in places:
        if len(path) < int(options.max_spec_factor * place.match + options.max_spec_offset) and all(
            _token_after(place, own, path[:i]) == token for i, token in enumerate(path)
        ):
            token = _token_after(place, own, path)
            if token is not None:
                votes.append((place.match, token))
    chances: dict[int, float] = {}
    counts: dict[int, int] = {}
    share, threshold, index = 1.0, float("inf"), 0
    while index < len(votes):
        match = votes[index][0]
        while index < len(votes) and votes[index][0] == match:
            counts[votes[index][1]] = counts.get(votes[index][1], 0) + 1
            index += 1
        if match > threshold:
            continue
        threshold = match / 2
        for token, count in counts.items():
            chance = share * copy_confidence(match + len(path), count, index)
            chances[token] = chances.get(token, 0.0) + chance
        share *= copy_doubt(match + len(path), index)
    return list(chances.items())


def _token_after(place: Place, own: Document, drafts: Seq[int]) -> int | None:
    """What stands `len(drafts)` tokens after the place; past the end of the own text, round its loop."""
    text = place.document.tokens
    index = place.start + len(drafts)
    if index < len(text):
        return text[index]
    loops = place.document is own and place.match >= len(text) - place.start
    return drafts[index - len(text)] if loops else None
