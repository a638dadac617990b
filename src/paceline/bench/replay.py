"""What each drafter would have proposed at every position of a text that is there already.

Three ways, with the same result:

- any drafter: the text is committed token by token; before each the drafter is asked, and nothing it says counts;
- a draft model: one prefill of the text. As long as its drafts match the text they *are* the text, so its next draft
  after k matched ones is its own draw after k more tokens of the text. Where its draw at every position is known,
  how far a draft from any position matches is a run of agreements. Under `coupled` a draw belongs to its absolute
  position, so this holds at every temperature. Its rows have the bits of single steps where the row policy is proved.
- a draft model that reads the text in its own way: the same runs, found round by round, each from where the last
  one ended.

Refused: drafters that need hidden states of the target, which a text does not hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from paceline.core.proposal import Proposal
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import Drafter, SequenceView
from paceline.decode.draft.layer_skip import LayerSkipDrafter
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.translate import TranslatingDrafter
from paceline.decode.model.base import TargetModel
from paceline.decode.model.step import Span, build_inputs
from paceline.decode.verify.noise import Purpose, position_key
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.probabilities import draw, greedy_tokens
from paceline.errors import RequestFailed, UsageError
from paceline.plan.probe_file import Drafts

__all__ = ["Text", "matched_tokens", "model_of", "replay", "replay_by_prefill", "replay_by_rounds",
           "replay_token_by_token"]  # fmt: skip

_CHUNK = 512
_KEYS = count()


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer, as the target wrote it under `params` (temperature alone) and `noise_key`.

    ended   the model ended it; else it was cut, and no draft reaches past its last token
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ended: bool
    params: SamplingParams
    vocab_size: int
    noise_key: int = 0
    eos_token_ids: frozenset[int] = frozenset()

    def budget(self, done: int, longest: int) -> int:
        """Drafts a round may hold that begins with `done` output tokens."""
        return longest if self.ended else min(longest, len(self.output) - done - 1)

    def prefix(self) -> PrefixState:
        return PrefixState(self.prompt, self.params, self.vocab_size, self.eos_token_ids)


def model_of(drafter: Drafter) -> TargetModel | None:
    """The model whose passes are this drafter's steps; None for one that has none."""
    match drafter:
        case ModelDrafter() | TranslatingDrafter():
            return drafter.model
        case LayerSkipDrafter():
            return drafter.exit
    return None


def replay(
    drafter: Drafter, text: Text, longest: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Drafts, float]:
    """The drafts along `text`, and seconds of asking and telling by round; 0 for a model, whose passes are timed apart.

    Raises UsageError for a drafter that cannot be replayed over a text.
    """
    if drafter.needs.hidden_layers:
        raise UsageError(f"the drafter {drafter.name} needs hidden states of the target; a text cannot replay it")
    match drafter:
        case ModelDrafter():
            return replay_by_prefill(drafter.model, drafter.max_positions, text, longest), 0.0
        case LayerSkipDrafter():
            return replay_by_prefill(drafter.exit, drafter.exit.max_positions, text, longest), 0.0
        case TranslatingDrafter():
            return replay_by_rounds(drafter, text, longest), 0.0
    return replay_token_by_token(drafter, text, longest, clock)


def _view(text: Text) -> SequenceView:
    return SequenceView(
        key=-1 - next(_KEYS),  # none of an engine's
        tokens=list(text.prompt),
        prompt_len=len(text.prompt),
        params=text.params,
        noise_key=text.noise_key,
        tenant=f"replay/{next(_KEYS)}",
        prefix=text.prefix(),
    )


def _commit(drafter: Drafter, view: SequenceView, tokens: Sequence[int]) -> None:
    view.tokens.extend(tokens)
    view.prefix.commit(list(tokens))
    drafter.observe([view], [None])


def replay_token_by_token(
    drafter: Drafter, text: Text, longest: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Drafts, float]:
    """See the module's docstring; works with every drafter."""
    view = _view(text)
    proposals: list[Proposal] = []
    spent = 0.0
    drafter.begin(view)
    try:
        for done, token in enumerate(text.output):
            began = clock()
            if done > 0:
                proposals += drafter.propose([view], [text.budget(done, longest)])
            _commit(drafter, view, [token])
            spent += clock() - began
    finally:
        drafter.end(view)
    matched = [matched_tokens(p, text.output[done:]) for done, p in enumerate(proposals, start=1)]
    proposed = [max(p.depths(), default=0) for p in proposals]
    drafts = Drafts(tuple(proposed), tuple(matched), _confidence(proposals, matched))
    return drafts, spent / max(len(text.output), 1)


def _confidence(proposals: Sequence[Proposal], matched: Sequence[int]) -> tuple[tuple[float, ...], ...] | None:
    """Those of chains that state any, as far as they were put to the test."""
    if any(p and (p.confidence is None or not p.is_chain) for p in proposals):
        return None
    return tuple(
        tuple(round(c, 4) for c in (p.confidence or ())[: m + 1]) for p, m in zip(proposals, matched, strict=True)
    )


def matched_tokens(proposal: Proposal, rest: Sequence[int]) -> int:
    """How many tokens of `rest` the proposal's best path begins with."""
    alive: set[int | None] = {None}
    for depth, token in enumerate(rest):
        alive = {n for n, p in enumerate(proposal.parents) if p in alive and proposal.tokens[n] == token}
        if not alive:
            return depth
    return len(rest)


def replay_by_rounds(drafter: Drafter, text: Text, longest: int) -> Drafts:
    """See the module's docstring; for drafters of chains that go on alike from every token of their own draft."""
    positions = len(text.output) - 1
    agrees, stated = [False] * positions, [0.0] * positions
    view = _view(text)
    drafter.begin(view)
    done = 0
    try:
        while done < positions:
            _commit(drafter, view, text.output[len(view.tokens) - len(text.prompt) : done + 1])
            (proposal,) = drafter.propose([view], [text.budget(done + 1, longest)])
            matched = matched_tokens(proposal, text.output[done + 1 :])
            agrees[done : done + matched] = [True] * matched
            told = (proposal.confidence or (0.0,) * len(proposal))[: min(matched + 1, positions - done)]
            stated[done : done + len(told)] = told
            done += matched if 0 < matched == len(proposal) else matched + 1
    finally:
        drafter.end(view)
    return _from_agreement(text, agrees, stated, longest)


def replay_by_prefill(model: TargetModel, max_positions: int, text: Text, longest: int) -> Drafts:
    """See the module's docstring; `model` drafts for a context of at most `max_positions`."""
    positions = len(text.output) - 1
    tokens = [*text.prompt, *text.output]
    if positions < 1 or max(tokens) >= model.vocab_width or len(tokens) > max_positions:
        return Drafts((0,) * max(positions, 0), (0,) * max(positions, 0))
    agrees: list[bool] = []
    stated: list[float] = []
    for first, logits in _logits_along(model, tokens[:-1], len(text.prompt)):
        drawn, chance = _draws(text, logits, first + 1)
        agrees += [d == t for d, t in zip(drawn, tokens[first + 1 :], strict=False)]
        stated += chance
    return _from_agreement(text, agrees, stated, longest)


def _from_agreement(text: Text, agrees: Sequence[bool], stated: Sequence[float], longest: int) -> Drafts:
    """Drafts from every position, where it is known whether the draft at each is the text's token."""
    proposed = [text.budget(done, longest) for done in range(1, len(text.output))]
    matched = [_run(agrees, i, most) for i, most in enumerate(proposed)]
    confidence = tuple(
        tuple(round(c, 4) for c in stated[i : i + min(m + 1, p)])
        for i, (m, p) in enumerate(zip(matched, proposed, strict=True))
    )
    return Drafts(tuple(proposed), tuple(matched), confidence)


def _run(agrees: Sequence[bool], first: int, most: int) -> int:
    length = 0
    while length < most and first + length < len(agrees) and agrees[first + length]:
        length += 1
    return length


def _logits_along(model: TargetModel, tokens: Sequence[int], first_wanted: int) -> Iterator[tuple[int, Tensor]]:
    """(index, logits of the rows from there on) for every token from `first_wanted` on, in pieces.

    What lies before is read as a drafter catches up; then as many rows a pass as are sure to be what they are alone.
    """
    cache = model.new_cache(1, len(tokens))
    cache.reserve_capacity(len(tokens))
    start, tile = first_wanted + 1, model.row_policy.tile
    bounds = [*range(0, start, _CHUNK), *range(start, len(tokens), tile), len(tokens)]
    for low, high in itertools.pairwise(bounds):
        whole = low >= start
        want: Literal["all", "last", "none"] = "all" if whole else "last" if high == start else "none"
        span = Span(0, low, tokens[low:high], want=want, prefill=not whole and high - low > tile)
        inputs = build_inputs([span], cache.capacity, model.geometry, model.row_policy)
        result = model.forward(inputs, cache)
        if want != "none":
            first, rows = inputs.logits_of[0]
            yield high - rows, result.logits[first : first + rows]


def _draws(text: Text, logits: Tensor, position: int) -> tuple[list[int | None], list[float]]:
    """The draft model's draws and its confidence, for rows whose next tokens stand at `position` and after."""
    chance = logits[:, : text.vocab_size].softmax(-1).amax(-1).tolist()
    if text.params.greedy:
        best, usable = greedy_tokens(logits, text.vocab_size)
        return [b if u else None for b, u in zip(best.tolist(), usable.tolist(), strict=True)], chance
    keys = [position_key(text.noise_key, position + i, Purpose.TARGET) for i in range(len(logits))]
    try:
        drawn = draw(logits, text.params, text.prefix(), [[]] * len(logits), torch.tensor(keys, device=logits.device))
    except RequestFailed:
        return [None] * len(logits), chance
    return list(drawn.tolist()), chance
