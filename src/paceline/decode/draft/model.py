"""A smaller model of the same vocabulary drafts, token by token.

Its own KV cache follows the committed tokens lazily: before it drafts, the tokens it has not seen yet are run in
one pass. What it wrote for its own drafts is kept as far as it turns out to be committed. Drafts are drawn under
all sampling options of the request and the prefix at that very position, with the noise that the acceptance rule
wants (`draws.py`): the target's under `coupled`; noise of their own under `rejection` and `block`, and then the
proposal says what each was drawn from. At temperature 0 they are the argmax.

When a sequence ends, the slot stays as it is until another sequence needs it; one of the same tenant that begins
likewise goes on from it, as the target does.

Past its own maximum length, where its memory is used up, or after a token it has no embedding for, it proposes
nothing, for that sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.proposal import Dense, OneHot, Proposal, Verdict
from paceline.decode.cache import MIN_SHARED, KVCache
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.draws import draft_key, reports_probs
from paceline.decode.draft.match import shared_length
from paceline.decode.draft.model_tree import WrittenTree, grow_trees, new_tree
from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs
from paceline.decode.verify.probabilities import draw, greedy_tokens, is_plain_greedy, to_probs
from paceline.errors import RequestFailed

__all__ = ["DraftState", "Growing", "ModelDrafter"]


@dataclass(slots=True)
class DraftState:
    """`written` are the tokens whose keys and values lie in the slot, drafts included; behind them those of `tree`."""

    slot: int
    written: list[int] = field(default_factory=list)
    tree: WrittenTree | None = None
    kind: tuple[str, bool] = ("", False)  # tenant, and by which rotation, of a model that has two


@dataclass(slots=True)
class Growing:
    """One sequence while it is drafted for."""

    view: SequenceView
    budget: int
    state: DraftState
    tokens: Seq[int] = ()  # what the draft reads before its drafts
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    stopped: bool = False


class ModelDrafter:
    """See the module's docstring.

    model          weights of the draft
    max_positions  its context; it stays silent where a draft would lie past it
    slots          sequences it can follow at once, the engine's batch
    read           what it reads of a sequence, where that is not the committed tokens (`translate.py`)
    stop_ids       drafting ends behind these (end-of-text): nothing can follow (unbiased, see `verify/rules.py`)
    keep           whether slots of ended sequences are kept for others
    cache_bytes    memory the cache may take; None is all slots to `max_positions`
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        name: str,
        max_positions: int,
        slots: int,
        stop_ids: frozenset[int] = frozenset(),
        prefill_chunk: int = 512,
        read: Callable[[SequenceView], list[int]] | None = None,
        keep: bool = True,
        cache_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.needs = Needs(own_kv=True, trees=True)
        self.model = model
        self.max_positions = max_positions
        self.cache = model.new_cache(slots, max_positions)
        self._stop_ids, self._chunk = stop_ids, min(prefill_chunk, self.cache.largest_write)
        self._read = read
        self.cache.budget = cache_bytes
        self._states: dict[int, DraftState] = {}
        self._keep = keep and read is None  # another tokenizer's tokens are not those of the view
        self._kept: list[DraftState] = []  # of ended sequences, the oldest first

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self._states, f"sequence {view.key} began twice"
        long_from = self.model.geometry.long_from
        kind = view.tenant, long_from is not None and self._limit(view) > long_from
        own = [state for state in self._kept if state.kind == kind]
        best = max(own, key=lambda state: shared_length(state.written, view.tokens), default=None)
        if best is not None and shared_length(best.written, view.tokens) >= MIN_SHARED:
            self._kept.remove(best)
            self._states[view.key] = best
            return
        if not self.cache.free_slots:
            self._forget_oldest()
        self._states[view.key] = DraftState(self.cache.allocate(0), kind=kind)

    def end(self, view: SequenceView) -> None:
        state = self._states.pop(view.key)
        state.tree = None
        shared = shared_length(state.written, view.tokens)
        if not self._keep or self.cache.resumable(state.slot, shared) < MIN_SHARED:
            self.cache.release(state.slot)
            return
        self._cut(state, shared)
        self.cache.shrink(state.slot)
        self._kept.append(state)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def own_cache(self) -> KVCache:
        return self.cache

    def clear_prefixes(self) -> None:
        while self._kept:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        assert self._kept, "more sequences draft than there are slots and memory for"
        self.cache.release(self._kept.pop(0).slot)

    def _cut(self, state: DraftState, tokens: int) -> None:
        self.cache.truncate(state.slot, tokens)
        del state.written[tokens:]

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        """Nothing to learn: the next `propose` compares what was written with what was committed."""

    def check_idle(self) -> None:
        assert not self._states, f"draft state is held for ended sequences {sorted(self._states)}"
        self.cache.check([state.slot for state in self._kept])

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        growing = []
        for view, budget in zip(views, budgets, strict=True):
            state = self._states[view.key]
            tokens = view.tokens if self._read is None else self._read(view)
            room = self.max_positions - len(tokens)
            growing.append(Growing(view, min(budget, room) if self._can_read(tokens, state) else 0, state, tokens))
        active = [g for g in growing if g.budget > 0 and g.view.tree_size is None]
        logits = self._catch_up(active)
        active = [g for g in active if g.budget > 0]
        while active:
            self.extend(active, logits)
            active = [g for g in active if not g.stopped and len(g.drafts) < g.budget]
            if active:
                logits = self._pass([(g, [g.drafts[-1]]) for g in active])
        trees = self._trees([g for g in growing if g.budget > 0 and g.view.tree_size is not None])
        return [trees.get(g.view.key) or self.proposal(g) for g in growing]

    def _trees(self, active: list[Growing]) -> dict[int, Proposal]:
        """By key: the proposals of sequences that asked for trees."""
        trees = []
        logits = self._catch_up(active)
        active = [g for g in active if g.budget > 0]
        for g in active:
            assert g.view.tree_size is not None
            ends = frozenset() if g.view.params.ignore_eos else self._stop_ids
            trees.append(
                new_tree(g.view, g.state.slot, len(g.tokens), g.budget, g.view.tree_size, self._limit(g.view), ends)
            )
        grow_trees(self.model, self.cache, trees, logits)
        for g, tree in zip(active, trees, strict=True):
            g.state.tree = tree.written
        return {tree.view.key: tree.proposal(self.name) for tree in trees}

    def _can_read(self, tokens: Seq[int], state: DraftState) -> bool:
        """Whether the draft has an embedding for every token it has yet to see."""
        return max(tokens[shared_length(state.written, tokens) :], default=0) < self.model.vocab_width

    def _limit(self, view: SequenceView) -> int:
        """Tokens the draft may read of a sequence; the same in every round."""
        asked = view.params.max_tokens
        if asked is None or self._read is not None:
            return self.max_positions
        return min(view.prompt_len + asked, self.max_positions)

    def _catch_up(self, active: list[Growing]) -> Tensor:
        """Run what each sequence has committed and the draft has not seen; logits after the last token."""
        missing: list[tuple[Growing, Seq[int]]] = []
        for g in active:
            known = shared_length(g.state.written, g.tokens)
            if g.state.tree is not None and known == len(g.state.written) < len(g.tokens):
                ahead = g.state.tree.keep(self.cache, g.state.slot, g.tokens[known:-1])
                g.state.written += ahead
                known += len(ahead)
            g.state.tree = None
            known = self.cache.resumable(g.state.slot, min(known, len(g.tokens) - 1))
            self._cut(g.state, known)
            if not self._grant(g):
                g.budget = 0
                continue
            missing.append((g, g.tokens[known:]))
        while any(len(tokens) > self._chunk for _, tokens in missing):
            self._pass([(g, tokens[: self._chunk]) for g, tokens in missing if len(tokens) > self._chunk])
            missing = [(g, t[self._chunk :] if len(t) > self._chunk else t) for g, t in missing]
        return self._pass(missing) if missing else torch.empty(0)

    def _grant(self, g: Growing) -> bool:
        """Memory for what is committed and the drafts; slots of ended sequences yield."""
        wanted = min(len(g.tokens) + (g.view.tree_size or g.budget), self.cache.limit)
        while not (granted := self.cache.grant(g.state.slot, wanted)) and self._kept:
            self._forget_oldest()
        return granted

    def _pass(self, entries: Seq[tuple[Growing, Seq[int]]]) -> Tensor:
        """One pass over the tokens of each entry; logits [entries, width] after the last of each."""
        with self.cache.transaction() as transaction:
            spans = []
            for g, tokens in entries:
                start = transaction.reserve(g.state.slot, len(tokens))
                limit = self._limit(g.view)
                spans.append(
                    Span(g.state.slot, start, tokens, want="last", prefill=len(tokens) > 32, limit=limit)
                )
            inputs = build_inputs(spans, self.cache.capacity, self.model.geometry, self.model.row_policy)
            logits = self.model.forward(inputs, self.cache).logits
            for g, tokens in entries:
                transaction.commit(g.state.slot, range(len(tokens)))
                g.state.written += tokens
        return logits[[first for first, _ in inputs.logits_of]]

    def extend(self, active: list[Growing], logits: Tensor) -> None:
        """Draw the next draft of each sequence from its row of `logits`, wherever those come from."""
        vocab = active[0].view.prefix.vocab_size
        best, usable = greedy_tokens(logits, vocab)
        chance = logits[:, :vocab].softmax(-1).amax(-1).tolist()
        for row, g in enumerate(active):
            view = g.view
            one = logits[row : row + 1]
            if is_plain_greedy(view.params, view.prefix):
                token = int(best[row]) if bool(usable[row]) else None
            else:
                token = self._draw(g, one)
            if token is None:
                g.stopped = True
                continue
            g.drafts.append(token)
            g.confidence.append(chance[row])
            g.stopped = token in self._stop_ids and not view.params.ignore_eos
            g.stopped |= view.more is not None and not view.more(g.confidence)

    def _draw(self, g: Growing, logits: Tensor) -> int | None:
        """A draft under the request's options; None where the draft's logits allow no token."""
        view, path = g.view, [list(g.drafts)]
        key = draft_key(view, len(view.tokens) + len(g.drafts))
        try:
            token = draw(logits, view.params, view.prefix, path, torch.tensor([key], device=logits.device))
        except RequestFailed:
            return None
        if reports_probs(view):
            g.probs.append(to_probs(logits, view.params, view.prefix, path))
        return int(token[0])

    def proposal(self, g: Growing) -> Proposal:
        if not g.drafts:
            return Proposal()
        distribution = Dense(torch.cat(g.probs)) if g.probs else OneHot()
        return Proposal.chain(g.drafts, self.name, distribution, tuple(g.confidence))
