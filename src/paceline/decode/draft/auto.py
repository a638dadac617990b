"""`auto`: the controller's hands. It asks drafters, does what `plan.control` chooses, and tells it what came of it.

To the engine it is a drafter over whole batches: `propose` asks the free candidates (string matchers), lets the
controller choose for all sequences at once, runs the costly ones that were chosen, and hands over the drafts worth
verifying. All are chains: requests that want trees fix their draft length. A sequence begun with `only` has that one
candidate. What free candidates would have said is held against what is committed over as many rounds as it takes,
chosen or not; so are drafts that were made and not verified. Where asking brings nothing for a while, a free
candidate is asked less often, so that it takes no more than `ask_share` of a round, and nobody is asked while drafting
does not pay for the whole batch (`plan/control/guard.py`). It hears what was committed when it is asked again.

Exactness: draft length and drafter depend on all that was seen, drafts included, where the acceptance rule lets
them (`Rule.length_may_see_drafts`). Elsewhere sampled drafts are verified whole: a costly drafter may stop behind
what it has drafted, and is neither cut nor chosen because of it.

State moves in `observe` and `settle` alone; `propose` leaves a note of what it handed over, for them to score, and
tells free candidates what they have not heard yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Drafter, Needs, SequenceView, SharesTarget
from paceline.decode.draft.cut import cut
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.lengths import Load
from paceline.plan.control.records import Ask, Choice, ControlOptions, DrafterFacts, Lesson, RoundFacts

if TYPE_CHECKING:
    from paceline.decode.cache import KVCache
    from paceline.decode.model.base import TargetModel

__all__ = ["AutoDrafter", "Candidate", "mild_cost"]

_NOTHING, _PLAIN = Proposal(), Choice()
_NONE_MISSING: Mapping[int, int] = MappingProxyType({})
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
    """Drafts being held against what is committed; none where `tokens` is empty.

    depth   how many came true so far
    hit     round of the sequence in which a draft last came true
    """

    tokens: tuple[int, ...] = ()
    confidence: Seq[float | None] = ()
    depth: int = 0
    hit: int = 0


@dataclass(slots=True)
class _Note:
    """What `propose` saw and handed over: offers by candidate, drafted for verification or not."""

    choice: Choice
    offers: dict[int, Proposal]
    handed: Proposal = _NOTHING


@dataclass(slots=True)
class _State:
    """By candidate: `known` are the tokens that a costly one has read, or that a free one has heard of. `asks` are the
    rounds in which the sequence was asked for."""

    watches: list[_Watch]
    known: list[int]
    allowed: Seq[int]
    seen: int
    asks: int = 0
    note: _Note | None = None


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
        self._free = [i for i, c in enumerate(candidates) if c.steps is None]
        self._costly = [i for i, c in enumerate(candidates) if c.steps is not None]
        self._clock = clock
        self._states: dict[int, _State] = {}
        self._question: tuple[list[int], ...] = ()  # the last, and its answer, for a question asked twice
        self._answer: list[Proposal] = []
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
        known = [len(view.tokens) if i in self._free else 0 for i in range(count)]
        self._states[view.key] = _State([_Watch() for _ in range(count)], known, allowed, len(view.tokens))
        self.controller.begin(view.key, view.params.temperature)
        for index in allowed:
            self.drafters[index].begin(view)

    def end(self, view: SequenceView) -> None:
        state = self._states.pop(view.key)
        self.controller.end(view.key)
        for index in state.allowed:
            if index in self._free and state.known[index] < len(view.tokens):
                self.drafters[index].observe([view], [None])
            self.drafters[index].end(view)

    def check_idle(self) -> None:
        assert not self._states, f"auto holds estimates for sequences {sorted(self._states)}"
        assert not self.controller.held, f"the controller holds sequences {self.controller.held}"
        for drafter in self.drafters:
            drafter.check_idle()

    # -- proposing -----------------------------------------------------------------------------------------

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        question = [view.key for view in views], [len(view.tokens) for view in views], list(budgets)
        if question == self._question:
            return list(self._answer)
        if not self.controller.may_draft(len(self.others)):
            self._question, self._answer = question, [_NOTHING] * len(views)
            return list(self._answer)
        states = [self._states[key] for key in question[0]]
        previews = self._previews(views, budgets, states)
        asks = [self._ask(*each) for each in zip(views, budgets, states, previews, strict=True)]
        choices = self.controller.choose(asks, self.load, self.others)
        answer: list[Proposal] = []
        for state, choice, offers in zip(states, choices, previews, strict=True):
            drafter = choice.drafter
            handed = _NOTHING if drafter is None or drafter not in offers else cut(offers[drafter], choice.length)
            state.note = _Note(choice, offers, handed)
            answer.append(handed)
        for index in self._costly:
            chosen = [i for i, choice in enumerate(choices) if choice.drafter == index]
            if chosen:
                self._draft(index, [views[i] for i in chosen], [asks[i] for i in chosen])
                for i in chosen:
                    answer[i] = self._note(views[i]).handed
        self._question, self._answer = question, answer
        return list(answer)

    def _previews(
        self, views: Seq[SequenceView], budgets: Seq[int], states: Seq[_State]
    ) -> list[dict[int, Proposal]]:
        """What the free candidates propose to each; those that are to be spared this round are left out."""
        previews: list[dict[int, Proposal]] = [{} for _ in views]
        for index in self._free:
            due = [
                i
                for i, state in enumerate(states)
                if index in state.allowed
                and budgets[i] > 0
                and (state.asks - state.watches[index].hit < _ASK_ROUNDS or self._is_due(state, index))
            ]
            if not due:
                continue
            began = self._clock()
            self._tell(index, [views[i] for i in due], [states[i] for i in due])
            made = self.drafters[index].propose([views[i] for i in due], [budgets[i] for i in due])
            took = (self._clock() - began) / len(due)
            self._ask_s[index] += (1.0 - 0.95 ** len(due)) * (took - self._ask_s[index])
            for i, proposal in zip(due, made, strict=True):
                previews[i][index] = proposal
        return previews

    def _tell(self, index: int, views: Seq[SequenceView], states: Seq[_State]) -> None:
        """A free candidate hears what was committed since it was asked last."""
        behind = [i for i, (v, s) in enumerate(zip(views, states, strict=True)) if s.known[index] < len(v.tokens)]
        if behind:
            self.drafters[index].observe([views[i] for i in behind], [None] * len(behind))
            for i in behind:
                states[i].known[index] = len(views[i].tokens)

    def _is_due(self, state: _State, index: int) -> bool:
        """Whether to ask a candidate that has brought this sequence nothing for a while."""
        if self._round_s <= 0.0:
            return True
        share = self._ask_s[index] * len(self._states) / self._round_s
        pause = min(max(int(share / self.controller.options.ask_share), 1), _LONGEST_PAUSE)
        return (state.asks - state.watches[index].hit) % pause == 0

    def _ask(self, view: SequenceView, budget: int, state: _State, previews: dict[int, Proposal]) -> Ask:
        offers = {i: p.confidence or (None,) * len(p) for i, p in previews.items() if p.tokens}
        length, missing = len(view.tokens), _NONE_MISSING
        if self._costly and budget > 0:
            missing = {i: length - state.known[i] for i in self._costly if i in state.allowed}
        room = view.params.max_tokens
        left = 1 << 30 if room is None else room - (length - view.prompt_len)
        return Ask(view.key, length, budget, left, offers, missing)

    def _draft(self, index: int, views: Seq[SequenceView], asks: Seq[Ask]) -> None:
        """Run a costly candidate for the sequences it was chosen for, and cut what it says to what is worth it."""
        notes = [self._note(view) for view in views]
        for view, note in zip(views, notes, strict=True):
            view.more = self._worth_going_on(view.key, note.choice)
        began = self._clock()
        made = self.drafters[index].propose(views, [note.choice.length for note in notes])
        took = self._clock() - began
        self.controller.drafted(index, [len(p) for p in made], sum(ask.missing[index] for ask in asks), took)
        refined = []
        for view, ask, note, proposal in zip(views, asks, notes, made, strict=True):
            view.more = None
            note.choice = note.choice.made(len(proposal))
            note.offers = {**note.offers, index: proposal}
            note.handed = proposal
            may_cut = view.rule.length_may_see_drafts or view.params.greedy
            if proposal.confidence and may_cut and note.choice.risk_s is None:
                refined.append((ask, index, proposal.confidence))
        if refined:
            kept = self.controller.refine(refined, self.load)
            handed = dict(zip((ask.key for ask, _, _ in refined), kept, strict=True))
            for view, note in zip(views, notes, strict=True):
                if view.key in handed:
                    note.handed = cut(note.offers[index], handed[view.key])

    def _worth_going_on(self, key: int, choice: Choice) -> Callable[[Seq[float]], bool]:
        return lambda confidence: self.controller.worth_going_on(key, choice, confidence)

    def _note(self, view: SequenceView) -> _Note:
        note = self._states[view.key].note
        assert note is not None
        return note

    # -- learning ------------------------------------------------------------------------------------------

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        self._question, self._answer = (), []
        states = [self._states[view.key] for view in views]
        choices = [_PLAIN if state.note is None else state.note.choice for state in states]
        emitted: list[int] = []
        lessons: list[Lesson] = []
        for view, state in zip(views, states, strict=True):
            committed = view.tokens[state.seen :]
            emitted.append(len(committed))
            if committed:
                self._hold(view.key, state, committed, lessons)
        grown = [i for i, count in enumerate(emitted) if count]
        self.controller.learn(lessons)
        self.controller.committed(
            [views[i].key for i in grown], [choices[i] for i in grown], [emitted[i] for i in grown]
        )
        for index in self._costly:
            own = [i for i, state in enumerate(states) if index in state.allowed]
            if own:
                heard = [verdicts[i] if choices[i].drafter == index else None for i in own]
                self.drafters[index].observe([views[i] for i in own], heard)

    def settle(self, facts: RoundFacts) -> list[float]:
        """Tell the controller what a round cost; the seconds it saved each sequence."""
        self._round_s += (0.05 if self._round_s else 1.0) * (facts.whole_s - self._round_s)
        return self.controller.settle(facts)

    def saw_fixed(self, name: str, temperature: float, proposed: int, accepted: int) -> None:
        """A request that fixes its length drafted with the candidate `name`: so much is known of it at least."""
        for index, drafter in enumerate(self.drafters):
            if drafter.name == name:
                self.controller.learn_fixed(index, temperature, proposed, accepted)

    def _hold(self, key: int, state: _State, committed: list[int], lessons: list[Lesson]) -> None:
        """Hold drafts against what was committed, those of the round and older ones that came true so far."""
        note, state.note = state.note, None
        if note is not None:
            state.asks += 1
            if note.choice.drafter in self._costly:
                self._read(key, state, note, committed, lessons)
            for index, proposal in note.offers.items():
                watch = state.watches[index]
                if not watch.tokens:
                    watch.tokens, watch.depth = proposal.tokens, 0
                    watch.confidence = proposal.confidence or (None,) * len(proposal.tokens)
        for index in state.allowed:
            if state.watches[index].tokens:
                lessons.append(self._hold_against(key, index, state.watches[index], committed, state.asks))
        state.seen += len(committed)

    def _read(self, key: int, state: _State, note: _Note, committed: list[int], lessons: list[Lesson]) -> None:
        """A costly candidate that drafted has read all that was committed before, and its drafts but the last."""
        index = note.choice.drafter
        assert index is not None
        if not note.offers[index].tokens:
            lessons.append(Lesson(key, index, 0, (None,), 0))  # chosen and silent: it cannot draft here
            return
        drafts, right = note.offers[index].tokens[:-1], 0
        while right < min(len(drafts), len(committed)) and drafts[right] == committed[right]:
            right += 1
        state.known[index] = state.seen + right

    def _hold_against(self, key: int, index: int, watch: _Watch, committed: list[int], asks: int) -> Lesson:
        """What became of the watched drafts; a miss, or their end, ends them."""
        tokens, first, hits = watch.tokens, watch.depth, 0
        most = min(len(tokens) - first, len(committed))
        while hits < most and tokens[first + hits] == committed[hits]:
            hits += 1
        lesson = Lesson(key, index, first, watch.confidence[first : first + min(hits + 1, most)], hits)
        watch.depth += hits
        if hits:
            watch.hit = asks
        if hits < most or watch.depth == len(tokens):
            watch.tokens = ()
        return lesson
