"""The controller: who drafts for each sequence in each round, and how far, so that it never loses to plain decoding.

    may_draft  before a round: False where drafting has lost as a whole, and nobody is to be asked
    choose     before a round: `choose_lengths` over the live cost and the survival of every draft on offer
    refine     when drafts are paid for and their confidence is known: how many of them are worth their rows
    learn      a draft came true or not (chosen or only watched)
    settle     a round is over: what it cost, what it brought

What is learnt, and when: free drafters (string matchers) are asked also while they are not used, and what they
would have said is held against what was committed. A costly drafter shows itself only when it drafts; so that a
bad stretch is not for ever, it is tried again, and tried longer than what pays, where three things hold: at its
hopeful best it would earn the trial back over what is left of the sequence; the loss to be feared fits into a
credit that grows by `probe_share` of all time; and no other trial runs in the round. The cheapest is taken, and broken
off where the drafter's own confidence says so: most is learnt from first drafts. Entering is priced: tokens
that a draft model has not read cost their reading. Plain rounds are measured again now and then, within
`plain_share` of all time, since only beside them a longer round can be called dear.

No clock, no randomness, no torch: the same facts give the same choices, live or in a replay.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.errors import InvalidParameter
from paceline.plan.control.cost import LiveCost, RoundView
from paceline.plan.control.guard import FEWEST, Guard
from paceline.plan.control.ledger import Ledger
from paceline.plan.control.lengths import Contender, Load, Option, Plan, choose_free, choose_lengths
from paceline.plan.control.records import Ask, Choice, ControlOptions, DrafterFacts, Lesson, RoundFacts
from paceline.plan.control.survival import AcceptanceTable, Learner, temperature_range

__all__ = ["Controller"]

_PLAIN, _SILENT = Choice(), Contender()
_FLOOR = 0.02  # drafts less likely than this pay nowhere
_MOST_CREDIT = 12.0  # plain rounds; bounds the trials in a row after a long quiet stretch
_FIRST_CREDIT = 4.0  # plain rounds that trials may lose before any income
_HORIZON = 32.0  # tokens a sequence is expected to emit yet, at least
_TYPICAL = 128.0  # tokens of an answer, before any has ended
_SMALL_ENTRY = 16  # tokens read to go on after a pause; more are an investment in the rest of the sequence
_CAUTION = 1.5  # on what reading promises to bring in: it is paid at once and may bring nothing
_LONGEST_STAY = 16.0
_QUIET_PRIOR = 4.0  # rounds that "this text is like the others" counts as
_QUIET_FADE = 0.97
_ALL_QUIET_FADE = 0.995
_LIKELY = 0.4
_MODEL_PRIOR = 0.7  # acceptance of a draft model's drafts before any was seen: published pairs lie about here
_UNSEEN_FADE = 0.985  # of what is known of a sequence, for each round in which a costly drafter was not seen


@dataclass(slots=True)
class _Quiet:
    """How much of a text no free drafter drafts: rounds and tokens, all and quiet ones, old ones fading."""

    rounds: float
    quiet_rounds: float
    tokens: float
    quiet_tokens: float

    def add(self, quiet: bool, emitted: int, fade: float) -> None:
        self.rounds = self.rounds * fade + 1.0
        self.quiet_rounds = self.quiet_rounds * fade + quiet
        self.tokens = self.tokens * fade + emitted
        self.quiet_tokens = self.quiet_tokens * fade + emitted * quiet

    def like(self, weight: float) -> _Quiet:
        """The same shares, counted as `weight` rounds."""
        share = weight / self.rounds
        return _Quiet(weight, self.quiet_rounds * share, self.tokens * share, self.quiet_tokens * share)

    @property
    def token_share(self) -> float:
        return self.quiet_tokens / self.tokens

    @property
    def stay(self) -> float:
        """Quiet rounds in a row, on average."""
        return min(self.rounds / max(self.rounds - self.quiet_rounds, 1e-9), _LONGEST_STAY)


@dataclass(slots=True)
class _Sequence:
    """learners by drafter, and `waiting`: rounds since each drafted."""

    learners: list[Learner]
    waiting: list[int]
    quiet: _Quiet
    emitted: int = 0


class Controller:
    """See the module's docstring.

    drafters   by index; an Ask speaks of them by it
    cost       kept live by `settle`
    """

    def __init__(self, drafters: Seq[DrafterFacts], cost: LiveCost, options: ControlOptions | None = None) -> None:
        names = [facts.name for facts in drafters]
        if not names or len(set(names)) < len(names):
            raise InvalidParameter("candidates", names, "one or more drafters of different names")
        self.drafters, self.cost, self.options = tuple(drafters), cost, options or ControlOptions()
        self._costly = [i for i, facts in enumerate(drafters) if not facts.free]
        self.tables = [AcceptanceTable() if facts.free else AcceptanceTable(_MODEL_PRIOR) for facts in drafters]
        self.ledger, self.guard = Ledger(self.drafters, self.tables, cost), Guard()
        self._factor = [1.0] * len(drafters)  # measured over expected drafting time, at the target's speed
        self._seen = [0] * len(drafters)  # the round in which each last drafted
        self._sequences: dict[int, _Sequence] = {}
        self._quiet, self._ended = _Quiet(10.0, 9.0, 14.0, 10.0), 0
        self._credit_s = _FIRST_CREDIT * cost.seconds(1, 0, 1)
        self._plain_credit_s, self._since_plain = 0.0, 0
        self._drafted, self._typical = False, _TYPICAL
        self._token_s = cost.seconds(1, 0, 1)  # of a token by plain decoding, in the last round

    # -- sequences -----------------------------------------------------------------------------------------

    def begin(self, key: int, temperature: float = 0.0) -> None:
        temperatures = temperature_range(temperature)
        learners = [
            Learner(table, temperatures, not facts.free)
            for table, facts in zip(self.tables, self.drafters, strict=True)
        ]
        self._sequences[key] = _Sequence(learners, [0] * len(learners), self._quiet.like(_QUIET_PRIOR))

    def end(self, key: int) -> None:
        emitted = self._sequences.pop(key).emitted
        self._ended += 1
        self._typical += max(1.0 / (self._ended + 2.0), 0.1) * (emitted - self._typical)

    @property
    def held(self) -> list[int]:
        """Sequences that have begun and not ended."""
        return sorted(self._sequences)

    def learner(self, key: int, drafter: int) -> Learner:
        return self._sequences[key].learners[drafter]

    # -- choosing ------------------------------------------------------------------------------------------

    def may_draft(self, others: int = 0) -> bool:
        """Whether to ask drafters in the next round, `others` decoding beside the sequences here (`guard.py`)."""
        return self.guard.is_open(len(self._sequences) + others)

    def choose(self, asks: Seq[Ask], load: Load | None = None, others: Seq[int] = ()) -> list[Choice]:
        """A choice for each; `load` and the contexts `others` are of sequences that decode beside them."""
        if not any(ask.offers or ask.missing for ask in asks):
            return [_PLAIN] * len(asks)
        load, options = load or Load(), self.options
        view = self._view([*[ask.context for ask in asks], *others])
        min_gain = options.stay_gain if self._drafted else options.min_gain
        if not self._costly and max([len(ask.offers) for ask in asks]) == 1:
            return self._choose_free(asks, view, load, min_gain)
        state = [self._contender(ask, view) for ask in asks]
        plan = choose_lengths(state, view, load, min_gain)
        if self._plain_is_due(plan):
            return [_PLAIN] * len(asks)
        choices = [
            _PLAIN if option is None else Choice(contender.options[option].source, length)
            for contender, (option, length) in zip(state, plan.picks, strict=True)
        ]
        if not self._costly:
            return choices
        keep = self._keep(choices, plan, view)
        choices = [c._replace(keep=keep[c.drafter]) if c.drafter in keep else c for c in choices]
        return self._with_trial(choices, asks, plan, view, load)

    def _choose_free(self, asks: Seq[Ask], view: RoundView, load: Load, min_gain: float) -> list[Choice]:
        """`choose` where nobody has two offers and no drafter is costly."""
        survivals: list[list[float]] = []
        blocks_s: list[float] = []
        drafters: list[int] = []
        for key, context, budget, _, offers, _ in asks:
            survival: list[float] = []
            index = 0
            for index, confidence in offers.items():
                survival = self._sequences[key].learners[index].survival(confidence[:budget], _FLOOR)
            survivals.append(survival)
            blocks_s.append(view.block_s(context) if len(survival) >= view.block else 0.0)
            drafters.append(index)
        lengths, plan = choose_free(survivals, blocks_s, view, load, min_gain)
        if self._plain_is_due(plan):
            return [_PLAIN] * len(asks)
        return [Choice(index, n) if n else _PLAIN for index, n in zip(drafters, lengths, strict=True)]

    def refine(
        self, drafts: Seq[tuple[Ask, int, Seq[float | None]]], load: Load | None = None
    ) -> list[int]:
        """How many are worth verifying of drafts that are paid for: (sequence, drafter, confidences)."""
        view = self._view([ask.context for ask, _, _ in drafts])
        state = []
        for ask, drafter, confidence in drafts:
            survival = self.learner(ask.key, drafter).survival(confidence[: ask.budget], _FLOOR)
            state.append(Contender((Option(survival),) if survival else (), view.block_s(ask.context)))
        return [pick.length for pick in choose_lengths(state, view, load or Load()).picks]

    def worth_going_on(self, key: int, choice: Choice, confidence: Seq[float]) -> bool:
        """Whether a costly drafter should draft on after drafts of these confidences."""
        assert choice.drafter is not None
        learner, chance = self.learner(key, choice.drafter), 1.0
        for position, stated in enumerate(confidence):
            chance *= learner.acceptance(position, stated)
        following = learner.acceptance(len(confidence), None)
        if choice.risk_s is not None:  # a trial hopes
            following = max(following, learner.table.prior)
        return chance * following >= choice.keep

    def _view(self, contexts: Seq[int]) -> RoundView:
        view = self.cost.view(contexts)
        for index in self._costly:
            steps = self.drafters[index].steps
            assert steps is not None
            view.draft(index, steps, self._factor[index])
        return view

    def _contender(self, ask: Ask, view: RoundView) -> Contender:
        sequence = self._sequences[ask.key]
        options: list[Option] = []
        for index, confidence in ask.offers.items():
            survival = sequence.learners[index].survival(confidence[: ask.budget], _FLOOR)
            if survival:
                options.append(Option(survival, source=index))
        for index, missing in ask.missing.items():
            survival = sequence.learners[index].survival_unstated(ask.budget, _FLOOR)
            if survival:
                options.append(Option(survival, index, self._entry_s(sequence, ask, index, missing), index))
        return Contender(options, view.block_s(ask.context)) if options else _SILENT

    def _reading_s(self, drafter: int, missing: int) -> float:
        """Seconds to read `missing` tokens beyond the one that any step reads."""
        steps = self.drafters[drafter].steps
        assert steps is not None
        more = steps.at(max(missing, 1)) - steps.at(1)
        return max(more, 0.0) * self._factor[drafter] * self.cost.speed

    def _entry_s(self, sequence: _Sequence, ask: Ask, drafter: int, missing: int) -> float:
        """Catch-up as charged to one round: spread over the rounds it will serve, as far as the past tells."""
        small = self._reading_s(drafter, min(missing, _SMALL_ENTRY))
        charged = small / sequence.quiet.stay
        if missing <= _SMALL_ENTRY:
            return charged
        more = self._reading_s(drafter, missing) - small
        return charged + more * min(1.0, _CAUTION * 2.0 / max(self._horizon(sequence, ask), 1.0))

    def _horizon(self, sequence: _Sequence, ask: Ask) -> float:
        """Tokens that rounds without a free drafter's drafts are expected to emit yet."""
        left = min(float(ask.room), max(_HORIZON, self._typical - sequence.emitted, 0.5 * sequence.emitted))
        return left * sequence.quiet.token_share

    def _keep(self, choices: Seq[Choice], plan: Plan, view: RoundView) -> dict[int | None, float]:
        """By costly drafter: the least survival at which one more draft, and its row, earn their seconds."""
        keep: dict[int | None, float] = {}
        for index in self._costly:
            users = sum(choice.drafter == index for choice in choices)
            if users:
                keep[index] = plan.rate * view.step_s(index, users) / users
        return keep

    def _plain_is_due(self, plan: Plan) -> bool:
        """A plain round, only to measure it: it is long ago, and what it loses is saved up."""
        if plan.seconds == plan.plain_s and plan.tokens == plan.plain_tokens:
            return False
        loss = plan.rate / plan.plain_rate - 1.0
        return self._since_plain >= self.options.plain_every and loss * plan.plain_s <= self._plain_credit_s

    # -- trials --------------------------------------------------------------------------------------------

    def _with_trial(
        self, choices: list[Choice], asks: Seq[Ask], plan: Plan, view: RoundView, load: Load
    ) -> list[Choice]:
        """One costly drafter beyond what is expected to pay, where hope and credit allow: the cheapest trial.

        A sequence that the drafter has read is cheap to try again, until it has told what it can.
        """
        best: tuple[float, int, Choice] | None = None
        depths = {drafter: _sharing(choices, drafter) for drafter in self._costly}
        for i, ask in enumerate(asks):
            for index in ask.missing:
                trial = self._trial(choices[i], ask, index, plan, view, load, depths[index])
                if trial is not None:
                    assert trial.risk_s is not None
                    price = trial.risk_s / (trial.length - trial.usual)
                    if best is None or price < best[0]:
                        best = price, i, trial
        if best is not None:
            choices[best[1]] = best[2]
        return choices

    def _trial(
        self, choice: Choice, ask: Ask, drafter: int, plan: Plan, view: RoundView, load: Load, depths: Seq[int]
    ) -> Choice | None:
        sequence = self._sequences[ask.key]
        usual = choice.length if choice.drafter == drafter else 0
        if choice.drafter is not None and choice.drafter != drafter:
            return None
        entry_s = 0.0 if usual else self._reading_s(drafter, ask.missing[drafter])
        most = min(ask.budget, max(self.options.probe_length, 2 * usual))
        unseen = max(sequence.waiting[drafter], self.ledger.rounds - self._seen[drafter])
        hopes = sequence.learners[drafter].hopeful(most, unseen)
        users = len(plan.picks)  # if it is good for one, it may be for all
        likely = sum(hope >= _LIKELY for hope in hopes)  # deeper drafts would hardly be seen
        for length in sorted({max(likely, usual + 1), min(len(hopes), len(depths))}, reverse=True):
            if not usual < length <= len(hopes):
                continue
            extra_s = self._extra_s(ask, drafter, usual, length, plan, view, load, depths)
            shared_s = extra_s - (length - usual) * (view.step_s(drafter, 1) - view.step_s(drafter, users) / users)
            profit = sum(hopes[usual:length]) - plan.rate * min(extra_s, shared_s)  # tokens a round
            rounds = self._horizon(sequence, ask) / (1.0 + sum(hopes[:length]))
            if extra_s + entry_s <= self._credit_s and profit * rounds > plan.rate * (extra_s + entry_s):
                keep = plan.rate * view.step_s(drafter, users) / users
                return Choice(drafter, length, keep, extra_s + entry_s, usual)
        return None

    def _extra_s(
        self, ask: Ask, drafter: int, usual: int, length: int, plan: Plan, view: RoundView, load: Load, depths: Seq[int]
    ) -> float:
        """Seconds of drafting and verifying `length` instead of `usual` tokens, in steps shared where they are."""
        base = load.rows + len(plan.picks) + sum(pick.length for pick in plan.picks) - usual
        seconds = view.pass_s(base + length) - view.pass_s(base + usual)
        seconds += (length // view.block - usual // view.block) * view.block_s(ask.context)
        for depth in range(usual, length):
            sharing = depths[depth] if depth < len(depths) else 0
            seconds += view.step_s(drafter, sharing + 1) - (view.step_s(drafter, sharing) if sharing else 0.0)
        return seconds

    # -- learning ------------------------------------------------------------------------------------------

    def learn(self, lessons: Seq[Lesson]) -> None:
        for key, drafter, first, confidence, hits in lessons:
            self._sequences[key].learners[drafter].record(first, confidence, hits)

    def learn_fixed(self, drafter: int, temperature: float, proposed: int, accepted: int) -> None:
        """The outcome of drafts whose length a request fixed."""
        temperatures = temperature_range(temperature)
        for position in range(min(accepted + 1, proposed)):
            self.tables[drafter].record(position, None, position < accepted, temperatures)

    def drafted(self, drafter: int, lengths: Seq[int], missing: int, seconds: float) -> None:
        """A costly drafter made chains of these lengths after reading `missing` tokens, in `seconds`."""
        steps = self.drafters[drafter].steps
        if steps is None or not lengths or max(lengths) == 0:
            return
        expected = steps.at(max(missing, len(lengths)))
        expected += sum(steps.at(sum(n > depth for n in lengths)) for depth in range(1, max(lengths)))
        measured = seconds / (expected * self.cost.speed * self._factor[drafter])
        self._factor[drafter] *= min(max(measured, 0.8), 1.25) ** 0.1

    def committed(self, keys: Seq[int], choices: Seq[Choice], emitted: Seq[int]) -> None:
        """Each sequence emitted so many tokens in a round in which its choice was made for it.

        All that is kept of it is about costly drafters.
        """
        if not self._costly:
            return
        for key, choice, tokens in zip(keys, choices, emitted, strict=True):
            sequence = self._sequences[key]
            sequence.emitted += tokens
            quiet = choice.drafter is None or not self.drafters[choice.drafter].free
            sequence.quiet.add(quiet, tokens, _QUIET_FADE)
            self._quiet.add(quiet, tokens, _ALL_QUIET_FADE)
            for index in self._costly:
                if choice.drafter == index:
                    sequence.waiting[index], self._seen[index] = 0, self.ledger.rounds
                else:
                    sequence.waiting[index] += 1
                    sequence.learners[index].fade(_UNSEEN_FADE)
            if choice.risk_s is not None:
                gained = max(0, tokens - 1 - choice.usual) * self._token_s
                self._credit_s -= max(0.0, choice.risk_s - gained)

    def settle(self, facts: RoundFacts) -> list[float]:
        """A round is over; returns the seconds it saved each sequence against plain decoding."""
        cost, count = self.cost, len(facts.queries)
        keys = cost.all_keys(facts.queries, facts.contexts)
        if count and not facts.prefill:
            cost.observe(facts.rows, keys, count, facts.whole_s - facts.draft_s)
        plain_keys = cost.all_keys([1] * count, facts.contexts)
        plain_s = cost.seconds(count, plain_keys, count) if count else 0.0
        if self._costly:
            most = _MOST_CREDIT * cost.seconds(max(count, 1), keys, max(count, 1))
            self._credit_s = min(self._credit_s + self.options.probe_share * facts.whole_s, most)
            self._token_s = plain_s / count if count else self._token_s
        self._drafted = facts.rows > count
        drafted_s = cost.seconds(facts.rows, keys, count) if self._drafted else plain_s
        self._plain_credit_s += self.options.plain_share * facts.whole_s
        if self._drafted or facts.prefill:
            self._since_plain += 1
        elif count:
            if self._since_plain >= self.options.plain_every:
                self._plain_credit_s = 0.0
            self._since_plain = 0
        more_s = drafted_s - plain_s if facts.prefill else drafted_s  # than plain decoding beside the same prompts
        saved = self.ledger.add(facts, plain_s, more_s + facts.draft_s)
        if count >= FEWEST and not facts.prefill:
            gain = sum(saved) / (count * plain_s)
            self.guard.add(facts.emitted, facts.whole_s, cost.at_start(count, plain_keys), gain)
        if not self._sequences:
            self.ledger.rest()
            self.guard.rest()
        return saved


def _sharing(choices: Seq[Choice], drafter: int) -> list[int]:
    """By depth, how many sequences `drafter` drafts for."""
    lengths = [choice.length for choice in choices if choice.drafter == drafter]
    return [sum(length > depth for length in lengths) for depth in range(max(lengths, default=0))]
