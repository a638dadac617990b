"""From logits to probabilities and to draws: one path for draft and target alike.

`to_probs` is the definition; `draw` gives the token that `argmin exponential_noise / to_probs` gives, without
computing either in full. Both see only the row's own prefix (`options.py`) and support (`support.py`).

Ids from `vocab_size` on are padding of the model's head: they have probability zero, whatever their logits.
A draft's logits may be narrower or wider than the target's; noise goes by token id, so both draw alike.

A row without any usable logit (NaN, nothing finite, every token excluded) raises RequestFailed. Logits of
plus infinity share all probability among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.noise import block_members, block_minima, exponential_noise
from paceline.decode.verify.options import apply_options, has_options
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.support import argmax, block_maxima, kept_tokens, largest, members, row_mass, scaled
from paceline.errors import RequestFailed

__all__ = [
    "PrefixState",
    "draw",
    "draw_by_definition",
    "greedy_tokens",
    "is_plain_greedy",
    "leading_tokens",
    "leading_tokens_greedy",
    "processed_logits",
    "to_probs",
]

# Scores closer than this (relative, in E / p) are judged by the definition, whose probabilities are float32.
_AMBIGUOUS = 1e-4
# Blocks looked at first, all rows together; then as many as a row's best score leaves in the race.
_RACE_BLOCKS = 256

Paths = Sequence[Sequence[int]]


def is_plain_greedy(params: SamplingParams, prefix: PrefixState) -> bool:
    """Whether every position from the next on is the argmax of the model's own logits over real ids."""
    return params.greedy and not has_options(params, prefix)


def greedy_tokens(
    logits: Tensor,  # [rows, width] of any number of sequences
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """For plain greedy sequences: each row's argmax [rows] int64 and whether the row is usable [rows] bool.

    Of equal logits the lowest id counts. A row that is not usable fails its own request only.
    """
    top, tokens = argmax(logits[:, :vocab_size])
    return tokens.squeeze(1), top.squeeze(1) > -math.inf


def leading_tokens_greedy(
    logits: Tensor,  # [rows, width] of any number of sequences
    vocab_size: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """`leading_tokens` for plain greedy sequences: the `count` most probable, with the model's own probabilities.

    An unusable row has shares of 0.
    """
    return _leaders(logits[:, :vocab_size], count)


def leading_tokens(
    logits: Tensor,  # [rows, width] of one sequence
    params: SamplingParams,
    prefix: PrefixState,
    paths: Paths,
    keys: Tensor,  # [rows] int64, as for `draw`
    count: int,
) -> tuple[Tensor, Tensor]:
    """The first tokens of each row's race E / p, both [rows, count or the ids there are]: ids, and their shares.

    They are drawn without replacement from p, one after another; the first is what `draw` gives. A share is p / E over
    the sum of p / E of the blocks that were looked at (at temperature 0 p over the sum, p from the processed logits),
    0 for a token that cannot be drawn. Raises RequestFailed.
    """
    real = _real_logits(logits, params, prefix, paths)
    if params.greedy:
        if not bool((real.amax(-1) > -math.inf).all()):
            _fail(real, logits, prefix, paths)
        return _leaders(real, count)
    maxima = block_maxima(real)
    real, maxima, top = _usable(real, maxima, logits, prefix, paths)
    kept = kept_tokens(real, params, top, maxima)
    if kept is None:
        bounds = scaled(maxima, top, params.temperature) - block_minima(keys, maxima.shape[1]).log_()
        scores, ids = _scores_of_blocks(real, bounds, top, keys, 64, params.temperature)
        last = scores.topk(min(count, scores.shape[1]), dim=-1).values[:, -1:]
        rivals = int((bounds > last).sum(-1).max())  # blocks that may hold one of the first
        if rivals > 64:
            scores, ids = _scores_of_blocks(real, bounds, top, keys, rivals, params.temperature)
    else:
        ids, keep = kept
        scores = scaled(real.gather(1, ids), top, params.temperature) - exponential_noise(keys, ids).log_()
        scores.masked_fill_(~keep, -math.inf)
    values, order = scores.topk(min(max(count, 2), scores.shape[1]), dim=-1)
    ids = ids.gather(1, order)
    for row in _too_close(values):
        one = slice(row, row + 1)
        ids[row] = _first(int(draw(logits[one], params, prefix, paths[one], keys[one])), ids[row])
    shares = (values - scores.logsumexp(-1, keepdim=True)).exp_()
    return ids[:, :count], shares[:, :count].float()


def _scores_of_blocks(
    real: Tensor, bounds: Tensor, top: Tensor, keys: Tensor, count: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Scores and ids of the tokens of the `count` blocks with the highest bounds, both [rows, tokens]."""
    chosen = bounds.topk(min(count, bounds.shape[1]), dim=-1).indices
    ids, noise = block_members(keys, chosen)
    return scaled(members(real, ids), top, temperature) - noise.log_(), ids


def _leaders(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens of each row and their probabilities at temperature 1; 0 in rows without a finite top."""
    logits = logits.float()
    values, ids = largest(logits, min(count, logits.shape[1]), block_maxima(logits))
    top = values[:, :1]
    shares = scaled(values, top, 1.0).exp_() / row_mass(logits, top, 1.0)
    return ids, shares.masked_fill_(~top.isfinite(), 0.0).float()


def _too_close(values: Tensor) -> list[int]:  # [rows, n], in order
    """Rows whose winner does not stand clear of rounding."""
    if values.shape[1] < 2:
        return []
    return (values[:, 0] - values[:, 1] <= _AMBIGUOUS).nonzero().flatten().tolist()


def _first(winner: int, ids: Tensor) -> Tensor:
    """`ids` [n] with the winner in front."""
    return ids.new_tensor([winner, *(token for token in ids.tolist() if token != winner)][: len(ids)])


def processed_logits(
    logits: Tensor,  # [rows, width] of one sequence, any float type
    params: SamplingParams,
    prefix: PrefixState,
    paths: Paths,  # for each row, the drafts between the committed tokens and its position
) -> Tensor:
    """Logits after every option but temperature and truncation: [rows, width] float32, -inf on padding ids.

    May share memory with `logits` where nothing changes; never writes into it.
    """
    real = _real_logits(logits, params, prefix, paths)
    missing = logits.shape[1] - real.shape[1]
    return torch.nn.functional.pad(real, (0, missing), value=-math.inf) if missing else real


def to_probs(logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths) -> Tensor:
    """The distribution each row's token is drawn from, after all options: [rows, width] float32.

    Temperature 0 gives an exact one-hot. Arguments as for `processed_logits`; raises RequestFailed.
    """
    real = _real_logits(logits, params, prefix, paths)
    maxima = block_maxima(real)
    real, maxima, top = _usable(real, maxima, logits, prefix, paths)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    if params.greedy:
        return probs.scatter_(1, real.argmax(-1, keepdim=True), 1.0)
    kept = kept_tokens(real, params, top, maxima)
    if kept is None:
        weights = scaled(real, top, params.temperature).exp_()
        probs[:, : real.shape[1]] = weights / row_mass(real, top, params.temperature)
        return probs
    ids, keep = kept
    weights = scaled(real.gather(1, ids), top, params.temperature).exp_() * keep
    return probs.scatter_(1, ids, (weights / weights.sum(-1, keepdim=True)).float())


def draw(
    logits: Tensor,  # [rows, width] of one sequence
    params: SamplingParams,
    prefix: PrefixState,
    paths: Paths,
    keys: Tensor,  # [rows] int64: `position_key` of the row's absolute position and Purpose.TARGET
) -> Tensor:
    """The token of each row: [rows] int64. Equal to `draw_by_definition`; raises RequestFailed.

    Also how a draft model draws under `coupled`: its own logits, the request's params and prefix, and the
    target's keys of the positions it drafts for.
    """
    real = _real_logits(logits, params, prefix, paths)
    if params.greedy:
        top, tokens = argmax(real)
        if not bool((top > -math.inf).all()):
            _fail(real, logits, prefix, paths)
        return tokens.squeeze(1)
    maxima = block_maxima(real)
    real, maxima, top = _usable(real, maxima, logits, prefix, paths)
    kept = kept_tokens(real, params, top, maxima)
    if kept is None:
        tokens, sure = _race(real, maxima, top, params.temperature, keys)
    else:
        tokens, sure = _draw_kept(real, *kept, top, params.temperature, keys)
    for row in [] if bool(sure.all()) else (~sure).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        tokens[one] = draw_by_definition(logits[one], params, prefix, paths[one], keys[one])
    return tokens


def draw_by_definition(
    logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths, keys: Tensor
) -> Tensor:
    """argmin of Exp(1) noise over probability, over the whole row: [rows] int64."""
    probs = to_probs(logits, params, prefix, paths)
    ids = torch.arange(probs.shape[1], device=probs.device)
    return (exponential_noise(keys, ids) / probs.double()).argmin(-1)


def _real_logits(logits: Tensor, params: SamplingParams, prefix: PrefixState, paths: Paths) -> Tensor:
    """Processed logits of real ids only; a view of `logits` where nothing changes."""
    assert len(paths) == logits.shape[0], f"{len(paths)} paths for {logits.shape[0]} rows"
    real = logits[:, : prefix.vocab_size]
    if not has_options(params, prefix):
        return real.float()
    return apply_options(real.to(torch.float32, copy=True), params, prefix, paths)


def _usable(
    real: Tensor, maxima: Tensor, logits: Tensor, prefix: PrefixState, paths: Paths
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, their block maxima and each row's largest [rows, 1], all finite or -inf."""
    top = maxima.amax(-1, keepdim=True)
    if bool(top.isfinite().all()):
        return real, maxima, top
    if not bool((top > -math.inf).all()):
        _fail(real, logits, prefix, paths)
    endless = (top == math.inf).expand_as(real)
    shared = torch.where(real == math.inf, 0.0, -math.inf)
    real = torch.where(endless, shared, real)
    maxima = block_maxima(real)
    return real, maxima, maxima.amax(-1, keepdim=True)


def _fail(real: Tensor, logits: Tensor, prefix: PrefixState, paths: Paths) -> None:
    for processed, row, path in zip(real, logits[:, : prefix.vocab_size], paths, strict=True):
        at = f"output position {len(prefix.output) + len(path)}"
        if bool(row.isnan().any()):
            raise RequestFailed(f"the model returned NaN logits at {at}; try another dtype for it")
        if bool((row == -math.inf).all()):
            raise RequestFailed(f"the model returned no finite logit at {at}; check its weights")
        if bool((processed == -math.inf).all()):
            raise RequestFailed(
                f"no token is possible at {at}: allowed_token_ids, grammar, bad_words and min_tokens together exclude "
                f"all {real.shape[1]} the model can give; loosen one of them"
            )
    raise AssertionError("every row is usable")


def _draw_kept(
    real: Tensor, ids: Tensor, keep: Tensor, top: Tensor, temperature: float, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The draw among kept tokens [rows], and whether it stands clear of rounding [rows]."""
    scores = scaled(real.gather(1, ids), top, temperature) - exponential_noise(keys, ids).log_()
    scores.masked_fill_(~keep, -math.inf)
    tokens, _, sure = _winner(scores, ids, torch.full_like(scores[:, :1], -math.inf))
    return tokens, sure


def _race(
    real: Tensor, maxima: Tensor, top: Tensor, temperature: float, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The draw among all tokens [rows]; whether it stands clear of rounding and of blocks not seen [rows].

    A block's largest logit and its smallest noise bound the scores of its members.
    """
    bounds = scaled(maxima, top, temperature) - block_minima(keys, maxima.shape[1]).log_()
    count = min(64, max(16, _RACE_BLOCKS // len(real)))
    tokens, best, sure = _best_of_blocks(real, bounds, top, keys, count, temperature)
    if not bool(sure.all()):
        rows = (~sure).nonzero().squeeze(1)
        rivals = int((bounds[rows] > best[rows] - _AMBIGUOUS).sum(-1).max())
        tokens[rows], _, sure[rows] = _best_of_blocks(
            real[rows], bounds[rows], top[rows], keys[rows], rivals, temperature
        )
    return tokens, sure


def _best_of_blocks(
    real: Tensor, bounds: Tensor, top: Tensor, keys: Tensor, count: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_winner` among the tokens of the `count` blocks with the highest bounds."""
    chosen = bounds.topk(min(count + 1, bounds.shape[1]), dim=-1)
    ids, noise = block_members(keys, chosen.indices[:, :count])
    scores = scaled(members(real, ids), top, temperature) - noise.log_()
    unseen = torch.nn.functional.pad(chosen.values[:, count:], (1, 0), value=-math.inf)
    return _winner(scores, ids, unseen)


def _winner(scores: Tensor, ids: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best id [rows], its score [rows, 1], whether it clearly leads the next and `unseen` [rows]."""
    first = scores.topk(min(2, scores.shape[1]), dim=-1)
    rivals = torch.cat([first.values[:, 1:], unseen], dim=1).amax(-1)
    tokens = ids.gather(1, first.indices[:, :1]).squeeze(1)
    return tokens, first.values[:, :1], first.values[:, 0] - rivals > _AMBIGUOUS
