"""The best drafter for each sequence in each round, or none.

Every round, for every sequence, each candidate's acceptance is estimated by position; `choose_length` gives
its best length and the rate there, expected tokens per cost; the best rate drafts. Where no candidate beats
plain decoding, nothing is drafted.

What is learnt, and when: candidates marked `shadow` (string matchers: nearly free) are asked in every round,
and what they would have said is held against what was committed, over as many rounds as it takes, chosen or
not. A costly candidate shows itself only when it drafts; so that a bad stretch is not for ever, it is tried
again, and tried longer than what pays, whenever the loss to be feared fits into `probe_share` of what the
sequence has cost. A trial that is accepted loses nothing and so is soon repeated.

Exactness: draft length and drafter depend on drafted tokens (through their confidence) and on all that was
seen. Under `coupled` and greedy verification that cannot bias the output. Under `rejection` and `block` it is
allowed only for one-hot proposals whose length depends on committed tokens, which holds for the model-free
candidates; what a costly candidate has drafted is then verified whole (`Rule.length_may_see_drafts`).

State moves in `observe` alone; `propose` leaves a note of what it handed over, for `observe` to score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Drafter, Needs, SequenceView, SharesTarget
from paceline.decode.draft.cut import cut
from paceline.decode.draft.learn import AcceptanceTable, Learner
from paceline.errors import InvalidParameter
from paceline.plan.marginal import choose_length, expected_tokens

if TYPE_CHECKING:
    from paceline.decode.cache import KVCache
    from paceline.decode.model.base import TargetModel

__all__ = ["AutoDrafter", "AutoOptions", "Candidate", "mild_cost"]


_MOST_CREDIT = 4.0  # plain passes; bounds how many trials can fail in a row after a long quiet stretch


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter and its price, in plain target passes (one row of one sequence = 1).

    token_cost   of each drafted token
    round_cost   of each round in which it drafts
    shadow       it costs next to nothing to ask: ask it every round and learn from every round
    """

    drafter: Drafter
    token_cost: float = 0.0
    round_cost: float = 0.0
    shadow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """min_gain      drafting must promise this share more tokens per cost than plain decoding, >= 0
    probe_share   what trials of costly candidates may lose, as a share of the sequence's cost, in [0, 1)
    probe_length  the shortest trial, tokens, >= 1
    """

    min_gain: float = 0.02
    probe_share: float = 0.02
    probe_length: int = 4

    def __post_init__(self) -> None:
        if self.min_gain < 0.0:
            raise InvalidParameter("min_gain", self.min_gain, "a number from 0")
        if not 0.0 <= self.probe_share < 1.0:
            raise InvalidParameter("probe_share", self.probe_share, "a number from 0 to below 1")
        if self.probe_length < 1:
            raise InvalidParameter("probe_length", self.probe_length, "a whole number from 1")


def mild_cost(rows: int) -> float:
    """5 % of a pass for each further row: a target bound by reading its weights. Inject what is measured."""
    return 1.0 + 0.05 * (rows - 1)


@dataclass(slots=True)
class _Track:
    """What is known of one candidate in one sequence."""

    learner: Learner
    pending: Proposal = field(default_factory=Proposal)  # drafts being held against what is committed
    matched: int = 0  # of `pending`
    credit: float = 0.0  # loss its next trial may risk, plain passes
    waiting: int = 0  # rounds since it last drafted


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who drafts how far. Of a trial, `risk` is the loss in plain passes if its drafts beyond the first
    `usual` are rejected; None where it is no trial."""

    candidate: int | None = None
    length: int = 0
    risk: float | None = None
    usual: int = 0


@dataclass(frozen=True, slots=True)
class _Note:
    """What `propose` saw and handed over."""

    seen: int
    budget: int
    previews: Mapping[int | None, Proposal]
    choice: _Choice
    handed: Proposal


@dataclass(slots=True)
class _State:
    tracks: list[_Track]
    seen: int
    note: _Note | None = None


class AutoDrafter:
    """See the module's docstring.

    cost(rows)   relative cost of a target pass over `rows` rows of one sequence, cost(1) = 1; may change from
                 round to round (load, measurements)
    """

    name = "auto"

    def __init__(
        self,
        candidates: Seq[Candidate],
        cost: Callable[[int], float] = mild_cost,
        options: AutoOptions | None = None,
    ) -> None:
        names = [candidate.drafter.name for candidate in candidates]
        if not names or len(set(names)) < len(names):
            raise InvalidParameter("candidates", names, "one or more drafters of different names")
        self.candidates, self.cost, self.options = tuple(candidates), cost, options or AutoOptions()
        wanted = [candidate.drafter.needs for candidate in candidates]
        self.needs = Needs(
            hidden_layers=tuple(sorted({layer for needs in wanted for layer in needs.hidden_layers})),
            own_kv=any(needs.own_kv for needs in wanted),
            tokenizer=any(needs.tokenizer for needs in wanted),
            shares_target=any(needs.shares_target for needs in wanted),
        )
        self.tables = [AcceptanceTable() for _ in candidates]
        self._states: dict[int, _State] = {}

    def share_target(self, model: TargetModel, cache: KVCache) -> None:
        for candidate in self.candidates:
            if candidate.drafter.needs.shares_target:
                assert isinstance(candidate.drafter, SharesTarget)
                candidate.drafter.share_target(model, cache)

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self._states, f"sequence {view.key} began twice"
        self._states[view.key] = _State([_Track(Learner(table)) for table in self.tables], len(view.tokens))
        for candidate in self.candidates:
            candidate.drafter.begin(view)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        states = [self._states[view.key] for view in views]
        previews = self._previews(views, budgets, states)
        choices = [
            self._choose(state, seen, budget)
            for state, seen, budget in zip(states, previews, budgets, strict=True)
        ]
        handed = [
            cut(seen.get(choice.candidate, Proposal()), choice.length)
            for seen, choice in zip(previews, choices, strict=True)
        ]
        for index, candidate in enumerate(self.candidates):
            asked = [i for i, choice in enumerate(choices) if choice.candidate == index]
            if asked and not candidate.shadow:
                lengths = [choices[i].length for i in asked]
                proposals = candidate.drafter.propose([views[i] for i in asked], lengths)
                for i, proposal in zip(asked, proposals, strict=True):
                    previews[i] = {**previews[i], index: proposal}  # learn from all of it, cut or not
                    if views[i].rule.length_may_see_drafts:
                        proposal = self._refine(states[i].tracks[index], proposal, choices[i])
                    handed[i] = proposal
        for i, state in enumerate(states):
            state.note = _Note(state.seen, budgets[i], previews[i], choices[i], handed[i])
        return handed

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        drafted: list[int | None] = []
        for view in views:
            state = self._states[view.key]
            drafted.append(state.note.choice.candidate if state.note is not None else None)
            committed = view.tokens[state.seen :]
            if committed:
                self._learn(state, committed)
                state.seen = len(view.tokens)
        for index, candidate in enumerate(self.candidates):
            own = [v if d == index else None for v, d in zip(verdicts, drafted, strict=True)]
            candidate.drafter.observe(views, own)

    def end(self, view: SequenceView) -> None:
        del self._states[view.key]
        for candidate in self.candidates:
            candidate.drafter.end(view)

    def check_idle(self) -> None:
        assert not self._states, f"auto holds estimates for sequences {sorted(self._states)}"
        for candidate in self.candidates:
            candidate.drafter.check_idle()

    def _previews(
        self, views: Seq[SequenceView], budgets: Seq[int], states: Seq[_State]
    ) -> list[Mapping[int | None, Proposal]]:
        """What the shadow candidates propose for each view; asked once a round."""
        previews: list[Mapping[int | None, Proposal]] = []
        for view, budget, state in zip(views, budgets, states, strict=True):
            note = state.note
            if note is not None and (note.seen, note.budget) == (state.seen, budget):
                previews.append(note.previews)
                continue
            shadows = [i for i, candidate in enumerate(self.candidates) if candidate.shadow and budget > 0]
            previews.append({i: self.candidates[i].drafter.propose([view], [budget])[0] for i in shadows})
        return previews

    def _choose(self, state: _State, previews: Mapping[int | None, Proposal], budget: int) -> _Choice:
        best, best_rate, best_tokens = _Choice(), (1.0 + self.options.min_gain) / self.cost(1), 1.0
        for index, track in enumerate(state.tracks):
            survival = track.learner.survival(self._confidence(index, previews, budget))
            cost = self._round_cost(index)
            length = choose_length(survival, cost, self.options.min_gain)
            tokens = expected_tokens(survival, length)
            if length > 0 and tokens / cost(length) > best_rate:
                best, best_rate, best_tokens = _Choice(index, length), tokens / cost(length), tokens
        return self._trial(state, best, best_tokens, budget) or best

    def _confidence(
        self, index: int, previews: Mapping[int | None, Proposal], budget: int
    ) -> Seq[float | None]:
        if not self.candidates[index].shadow:
            return [None] * max(budget, 0)
        proposal = previews.get(index, Proposal())
        assert proposal.is_chain, f"{proposal.drafter} proposed a tree; auto chooses lengths of chains"
        return proposal.confidence or [None] * len(proposal)

    def _round_cost(self, index: int) -> Callable[[int], float]:
        """Draft length -> cost of the round with this candidate."""
        candidate = self.candidates[index]

        def cost(length: int) -> float:
            drafting = candidate.round_cost + candidate.token_cost * length if length else 0.0
            return self.cost(1 + length) + drafting

        return cost

    def _trial(self, state: _State, best: _Choice, best_tokens: float, budget: int) -> _Choice | None:
        """A costly candidate's draft that is not expected to pay, where its credit covers the loss."""
        trials = []
        for index, track in enumerate(state.tracks):
            usual = best.length if best.candidate == index else 0
            length = min(budget, max(self.options.probe_length, 2 * usual))
            if self.candidates[index].shadow or length <= usual:
                continue
            extra = (self._round_cost(index)(length) - self._cost_of(best)) / self.cost(1)
            risk = max(0.0, extra if usual else extra + best_tokens - 1.0)
            if risk <= track.credit:
                trials.append((track.waiting, index, _Choice(index, length, risk, usual)))
        return max(trials)[2] if trials else None

    def _cost_of(self, choice: _Choice) -> float:
        return self.cost(1) if choice.candidate is None else self._round_cost(choice.candidate)(choice.length)

    def _refine(self, track: _Track, proposal: Proposal, choice: _Choice) -> Proposal:
        """The drafts are paid for; verify as many as their confidence is worth."""
        if choice.risk is not None or proposal.confidence is None:
            return proposal
        survival = track.learner.survival(proposal.confidence)
        return cut(proposal, choose_length(survival, lambda length: self.cost(1 + length)))

    def _learn(self, state: _State, committed: list[int]) -> None:
        note, state.note = state.note, None
        for index, track in enumerate(state.tracks):
            if note is not None and track.matched == len(track.pending):
                handed = note.handed if note.choice.candidate == index else Proposal()
                track.pending, track.matched = note.previews.get(index, handed), 0
                if note.choice.candidate == index and not track.pending:
                    track.learner.record(0, None, False)  # chosen and silent: it cannot draft here
            _hold_against(track, committed)
            if not self.candidates[index].shadow:
                self._pay(index, track, note, len(committed))

    def _pay(self, index: int, track: _Track, note: _Note | None, emitted: int) -> None:
        """Moves the credit for trials: income from every round, loss from a trial that did not pay."""
        choice = note.choice if note is not None else _Choice()
        track.waiting = 0 if choice.candidate == index else track.waiting + 1
        income = self.options.probe_share * self._cost_of(choice) / self.cost(1)
        track.credit = min(_MOST_CREDIT, track.credit + income)
        if choice.candidate == index and choice.risk is not None:
            gained = max(0, emitted - 1 - choice.usual)
            track.credit -= max(0.0, choice.risk - gained)


def _hold_against(track: _Track, committed: list[int]) -> None:
    """Scores the pending drafts against the committed tokens; a miss, or their end, ends them."""
    for token in committed:
        if track.matched == len(track.pending):
            return
        position, stated = track.matched, track.pending.confidence
        hit = track.pending.tokens[position] == token
        track.learner.record(position, None if stated is None else stated[position], hit)
        if not hit:
            track.pending, track.matched = Proposal(), 0
            return
        track.matched += 1
