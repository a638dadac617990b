"""`auto`: the controller's hands. It asks drafters, does what `plan.control` chooses, and tells it what came of it.

To the engine it is a drafter over whole batches: `propose` asks the free candidates (string matchers), lets the
controller choose for all sequences at once, runs the costly ones that were chosen, and hands over the nodes worth
verifying. A sequence begun with `only` has that one candidate. What free candidates would have said is held
against what is committed over as many rounds as it takes, chosen or not; so are drafts that were made and not
verified. Where asking brings nothing for a while, a free candidate is asked less often, so that it takes no more
than `ask_share` of a round.

Exactness: draft length and drafter depend on all that was seen, drafts included, where the acceptance rule lets
them (`Rule.length_may_see_drafts`). Elsewhere sampled drafts are verified whole: a costly drafter may stop behind
what it has drafted, and is neither cut nor chosen because of it.

State moves in `observe` and `settle` alone; `propose` leaves a note of what it handed over, for them to score.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Drafter, Needs, SequenceView, SharesTarget
from paceline.decode.draft.cut import keep_nodes
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.lengths import Load
from paceline.plan.control.records import Ask, Choice, ControlOptions, DrafterFacts, Offer, RoundFacts

if TYPE_CHECKING:
    from paceline.decode.cache import KVCache
    from paceline.decode.model.base import TargetModel

__all__ = ["AutoDrafter", "Candidate", "mild_cost"]

_NOTHING = Proposal()
_ASK_ROUNDS = 16  # rounds after its last hit in which a free candidate is asked every time
_LONGEST_PAUSE = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter and what its steps cost: `DrafterFacts.steps`; None for what is asked first, being nearly free.

    named   asked only for sequences that are begun with it alone
    """

    drafter: Drafter
    steps: StepTimes | None = None
    named: bool = False


def mild_cost(row: float = 0.05, block: int = 1) -> LiveCost:
    """A pass of one row is 1, each further row costs `row`: a target bound by reading its weights."""
    return LiveCost(StepTimes((1, 2), (1.0, 1.0 + row)), block)


@dataclass(slots=True)
class _Watch:
    """Drafts being held against what is committed."""

    proposal: Proposal = _NOTHING
    chain: bool = True
    at: int | None = None  # of a tree, the last node that came true
    depth: int = 0
    hit: int = 0  # round of the sequence in which a draft last came true
    done: bool = True


@dataclass(slots=True)
class _Note:
    """What `propose` saw and handed over: offers by candidate, drafted for verification or not."""

    choice: Choice
    offers: dict[int, Proposal]
    handed: Proposal = _NOTHING


@dataclass(slots=True)
class _State:
    """`known` are the tokens a costly candidate has read, `asks` the rounds in which the sequence was asked for."""

    watches: list[_Watch]
    known: list[int]
    allowed: Seq[int]
    seen: int
    asks: int = 0
    note: _Note | None = None


@dataclass(slots=True)
class _Last:
    """The last answer, for a question asked twice."""

    question: tuple[tuple[int, int, int], ...] = ()
    answer: list[Proposal] = field(default_factory=list)


class AutoDrafter:
    """See the module's docstring.

    load, others   what else decodes in the next round, and in which contexts; the engine sets them
    """

    name = "auto"

    def __init__(
        self,
        candidates: Seq[Candidate],
        cost: LiveCost | None = None,
        options: ControlOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        facts = [DrafterFacts(c.drafter.name, c.steps) for c in candidates]
        self.controller = Controller(facts, cost or mild_cost(), options)
        self.drafters = [c.drafter for c in candidates]
        self._own = [i for i, c in enumerate(candidates) if not c.named]
        assert self._own, "every candidate is for requests that name it"
        self.load, self.others = Load(), []  # type: tuple[Load, list[int]]
        wanted = [drafter.needs for drafter in self.drafters]
        self.needs = Needs(
            hidden_layers=tuple(sorted({layer for needs in wanted for layer in needs.hidden_layers})),
            own_kv=any(needs.own_kv for needs in wanted),
            tokenizer=any(needs.tokenizer for needs in wanted),
            shares_target=any(needs.shares_target for needs in wanted),
        )
        self._clock = clock
        self._states: dict[int, _State] = {}
        self._last = _Last()
        self._ask_s = [0.0] * len(candidates)  # running average of asking one sequence
        self._round_s = 0.0

    def share_target(self, model: TargetModel, cache: KVCache) -> None:
        for drafter in self.drafters:
            if drafter.needs.shares_target:
                assert isinstance(drafter, SharesTarget)
                drafter.share_target(model, cache)

    def begin(self, view: SequenceView, only: str | None = None) -> None:
        assert view.key not in self._states, f"sequence {view.key} began twice"
        count = len(self.drafters)
        allowed = self._own if only is None else [i for i, d in enumerate(self.drafters) if d.name == only]
        assert allowed, f"{only} is no candidate of auto"
        self._states[view.key] = _State([_Watch() for _ in range(count)], [0] * count, allowed, len(view.tokens))
        self.controller.begin(view.key, view.params.temperature)
        for index in allowed:
            self.drafters[index].begin(view)

    def end(self, view: SequenceView) -> None:
        state = self._states.pop(view.key)
        self.controller.end(view.key)
        for index in state.allowed:
            self.drafters[index].end(view)

    def check_idle(self) -> None:
        assert not self._states, f"auto holds estimates for sequences {sorted(self._states)}"
        assert not self.controller.held, f"the controller holds sequences {self.controller.held}"
        for drafter in self.drafters:
            drafter.check_idle()

    # -- proposing -----------------------------------------------------------------------------------------

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        question = tuple((v.key, len(v.tokens), b) for v, b in zip(views, budgets, strict=True))
        if question == self._last.question:
            return list(self._last.answer)
        states = [self._states[view.key] for view in views]
        previews = [self._previews(*each) for each in zip(views, budgets, states, strict=True)]
        asks = [self._ask(*each) for each in zip(views, budgets, states, previews, strict=True)]
        choices = self.controller.choose(asks, self.load, self.others)
        for state, choice, offers in zip(states, choices, previews, strict=True):
            state.note = _Note(choice, offers)
            if choice.drafter in offers:
                state.note.handed = keep_nodes(offers[choice.drafter], choice.nodes)
        for index, facts in enumerate(self.controller.drafters):
            chosen = [i for i, choice in enumerate(choices) if choice.drafter == index and not facts.free]
            if chosen:
                self._draft(index, [views[i] for i in chosen], [asks[i] for i in chosen])
        self._last = _Last(question, [state.note.handed for state in states if state.note is not None])
        return list(self._last.answer)

    def _previews(self, view: SequenceView, budget: int, state: _State) -> dict[int, Proposal]:
        """What the free candidates propose; those that are to be spared this round are left out."""
        previews: dict[int, Proposal] = {}
        for index in state.allowed:
            if budget <= 0 or not self.controller.drafters[index].free or not self._is_due(state, index):
                continue
            began = self._clock()
            previews[index] = self.drafters[index].propose([view], [budget])[0]
            self._ask_s[index] += 0.05 * (self._clock() - began - self._ask_s[index])
        return previews

    def _is_due(self, state: _State, index: int) -> bool:
        since = state.asks - state.watches[index].hit
        if since < _ASK_ROUNDS or self._round_s <= 0.0:
            return True
        share = self._ask_s[index] * len(self._states) / self._round_s
        return since % min(max(int(share / self.controller.options.ask_share), 1), _LONGEST_PAUSE) == 0

    def _ask(self, view: SequenceView, budget: int, state: _State, previews: dict[int, Proposal]) -> Ask:
        offers = {i: _offer(proposal) for i, proposal in previews.items() if len(proposal)}
        costly = [i for i in state.allowed if not self.controller.drafters[i].free] if budget > 0 else []
        missing = {i: len(view.tokens) - state.known[i] for i in costly}
        may_cut = view.rule.length_may_see_drafts or view.params.greedy
        room = view.params.max_tokens
        left = 1 << 30 if room is None else room - (len(view.tokens) - view.prompt_len)
        return Ask(view.key, len(view.tokens), budget, left, offers, missing, may_cut)

    def _draft(self, index: int, views: Seq[SequenceView], asks: Seq[Ask]) -> None:
        """Run a costly candidate for the sequences it was chosen for, and cut what it says to what is worth it."""
        notes = [self._note(view) for view in views]
        for view, note in zip(views, notes, strict=True):
            view.more = self._worth_going_on(view.key, note.choice)
        began = self._clock()
        made = self.drafters[index].propose(views, [len(note.choice.nodes) for note in notes])
        took = self._clock() - began
        self.controller.drafted(index, [len(p) for p in made], sum(ask.missing[index] for ask in asks), took)
        refined = []
        for view, ask, note, proposal in zip(views, asks, notes, made, strict=True):
            view.more = None
            note.choice = note.choice.made(len(proposal))
            note.offers = {**note.offers, index: proposal}
            note.handed = proposal
            if len(proposal) and ask.may_cut and note.choice.risk_s is None and proposal.confidence is not None:
                refined.append((ask, index, _offer(proposal)))
        if refined:
            kept = self.controller.refine(refined, self.load)
            handed = dict(zip((ask.key for ask, _, _ in refined), kept, strict=True))
            for view, note in zip(views, notes, strict=True):
                if view.key in handed:
                    note.handed = keep_nodes(note.offers[index], handed[view.key])

    def _worth_going_on(self, key: int, choice: Choice) -> Callable[[Seq[float]], bool]:
        return lambda confidence: self.controller.worth_going_on(key, choice, confidence)

    def _note(self, view: SequenceView) -> _Note:
        note = self._states[view.key].note
        assert note is not None
        return note

    # -- learning ------------------------------------------------------------------------------------------

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        self._last = _Last()
        drafted: list[int | None] = []
        for view in views:
            state = self._states[view.key]
            drafted.append(None if state.note is None else state.note.choice.drafter)
            committed = view.tokens[state.seen :]
            if committed:
                self._learn(view.key, state, committed)
                state.seen = len(view.tokens)
        for index, drafter in enumerate(self.drafters):
            own = [i for i, view in enumerate(views) if index in self._states[view.key].allowed]
            if own:
                drafter.observe([views[i] for i in own], [verdicts[i] if drafted[i] == index else None for i in own])

    def settle(self, facts: RoundFacts) -> list[float]:
        """Tell the controller what a round cost; the seconds it saved each sequence."""
        self._round_s += (0.05 if self._round_s else 1.0) * (facts.whole_s - self._round_s)
        return self.controller.settle(facts)

    def saw_fixed(self, name: str, temperature: float, proposed: int, accepted: int) -> None:
        """A request that fixes its length drafted with the candidate `name`: so much is known of it at least."""
        for index, drafter in enumerate(self.drafters):
            if drafter.name == name:
                self.controller.learn_fixed(index, temperature, proposed, accepted)

    def _learn(self, key: int, state: _State, committed: list[int]) -> None:
        note, state.note = state.note, None
        if note is not None:
            state.asks += 1
            self._read(state, note, committed)
            for index, proposal in note.offers.items():
                if state.watches[index].done:
                    hit = state.watches[index].hit
                    state.watches[index] = _Watch(proposal, proposal.is_chain, hit=hit, done=not len(proposal))
            silent = note.choice.drafter
            if silent is not None and silent in note.offers and not len(note.offers[silent]):
                self.controller.learn(key, silent, 0, (None,), 0)  # chosen and silent: it cannot draft here
        for index in state.allowed:
            if not state.watches[index].done:
                self._hold_against(key, index, state, committed)
        self.controller.committed(key, Choice() if note is None else note.choice, len(committed))

    def _read(self, state: _State, note: _Note, committed: list[int]) -> None:
        """A costly candidate that drafted has read all that was committed before, and its drafts but the last."""
        index = note.choice.drafter
        if index is None or self.controller.drafters[index].free or not len(note.offers[index]):
            return
        drafts = note.offers[index].tokens[:-1]
        right = 0
        while right < min(len(drafts), len(committed)) and drafts[right] == committed[right]:
            right += 1
        state.known[index] = state.seen + right

    def _hold_against(self, key: int, index: int, state: _State, committed: list[int]) -> None:
        """Score the watched drafts; a miss, or their end, ends them."""
        watch = state.watches[index]
        if watch.chain:
            self._hold_chain(key, index, watch, committed, state.asks)
        else:
            self._hold_tree(key, index, watch, committed, state.asks)

    def _hold_chain(self, key: int, index: int, watch: _Watch, committed: list[int], asks: int) -> None:
        tokens, stated, first, hits = watch.proposal.tokens, watch.proposal.confidence, watch.depth, 0
        most = min(len(tokens) - first, len(committed))
        while hits < most and tokens[first + hits] == committed[hits]:
            hits += 1
        seen = min(hits + 1, most)
        confidence: Seq[float | None] = (None,) * seen if stated is None else stated[first : first + seen]
        self.controller.learn(key, index, first, confidence, hits)
        watch.depth += hits
        watch.hit = asks if hits else watch.hit
        watch.done = hits < most or watch.depth == len(tokens)

    def _hold_tree(self, key: int, index: int, watch: _Watch, committed: list[int], asks: int) -> None:
        stated = watch.proposal.confidence
        tokens, parents = watch.proposal.tokens, watch.proposal.parents
        for token in committed:
            found = None
            for i in range(0 if watch.at is None else watch.at + 1, len(tokens)):  # children come behind their parent
                if parents[i] == watch.at:
                    hit = found is None and tokens[i] == token
                    self.controller.learn(key, index, watch.depth, (None if stated is None else stated[i],), int(hit))
                    found = i if hit else found
            if found is None:
                watch.done = True
                return
            watch.at, watch.depth, watch.hit = found, watch.depth + 1, asks
            if found not in parents:
                watch.done = True
                return


def _offer(proposal: Proposal) -> Offer:
    confidence: Seq[float | None] = proposal.confidence or [None] * len(proposal)
    return Offer(confidence, None if proposal.is_chain else proposal.parents)
