"""Draft mechanisms: what D drafted tokens cost, and what the drafter takes of memory.

| kind          | seconds for D tokens of each of B sequences                                   | source
        |
        |---------------|-------------------------------------------------------------------------------|---------------------|
| none          | 0                                                                             |
        | | ngram, suffix | a string match on the host, partly hidden                                     |
        arXiv
2601.11580    | | model         | D passes of the draft model
  | arXiv 2211.17192    | | layer-skip    | D passes of the first layers of the target and its head
  | arXiv 2404.16710    | | eagle3        | one layer over the 1+D verified tokens, then D-1 serial steps,
  small head | arXiv 2503.01840    | | mtp           | the same with a layer shaped like the target's (its
  experts too), full head | arXiv 2404.19737    | | dflash        | one pass of five layers over the whole
  block | arXiv 2602.06036    | | dspark        | the same and a light serial head
  | arXiv 2607.05147    |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter
from paceline.plan.cost import Work, count_work, price
from paceline.plan.hardware import weight_bytes
from paceline.plan.scenario import Scenario
from paceline.plan.shape import Attention, FeedForward, ModelShape

__all__ = ["KINDS", "Mechanism", "draft_memory", "draft_seconds", "draft_shape", "draft_works"]

Array = npt.NDArray[np.float64]

KINDS = ("none", "ngram", "suffix", "layer-skip", "model", "eagle3", "mtp", "dflash", "dspark")
_SERIAL = ("model", "layer-skip", "eagle3", "mtp")
_BLOCK_LAYERS = 5
# A string match on the host: .6 % of a verification in vLLM (arXiv 2601.11580), mostly hidden behind the
# device.
_MATCH_S = 3e-6
_MATCH_FIXED_S = 0.05e-3
_NO_MODEL = 0.4  # of the round's fixed cost, where no drafter's pass or hidden state has to be managed


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One way to draft.

    model            the draft model ("model"); None otherwise
    name             what the engine loads: path or repository of the drafter, for the export
    proposed_share   "ngram", "suffix": chance that a lookup proposes at all in a round (1: always)
    skip_share       "layer-skip": share of the target's layers that draft
    block            "dflash", "dspark": tokens of the trained block; lengths above it are not offered
    dtype            number format of the drafter's weights
    window           tokens the drafter attends to at most (sliding-window or sink drafting)
    """

    kind: str
    model: ModelShape | None = None
    name: str | None = None
    proposed_share: float = 1.0
    skip_share: float = 0.5
    block: int = 8
    dtype: str = "bf16"
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter("draft kind", self.kind, ", ".join(KINDS))
        if self.kind == "model" and self.model is None:
            raise InvalidParameter(
                "draft", "model", "model:NAME with a known model or a folder with a config.json"
            )
        for name, value in (("proposed share", self.proposed_share), ("skip share", self.skip_share)):
            if not 0 <= value <= 1:
                raise InvalidParameter(name, value, "a number from 0 to 1")
        if self.block < 1:
            raise InvalidParameter("block", self.block, "a whole number from 1")

    @property
    def label(self) -> str:
        return (
            f"{self.kind}:{self.name or self.model.name}"
            if self.kind == "model" and self.model
            else self.kind
        )

    @property
    def longest(self) -> int | None:
        """The longest draft it can be asked for, None without a bound."""
        return 0 if self.kind == "none" else self.block if self.kind in ("dflash", "dspark") else None

    def widths(self, draft_length: npt.ArrayLike) -> Array:
        """Mean tokens a sequence brings to the target's pass: lookups that find nothing bring one."""
        d = np.asarray(draft_length, dtype=np.float64)
        return np.asarray(1 + d * (self.proposed_share if self.kind in ("ngram", "suffix") else 1.0))

    def rounds(self, batch: npt.ArrayLike, draft_length: npt.ArrayLike) -> Array:
        """How often the round's fixed cost falls due: in rounds in which somebody proposes."""
        b, drafts = np.asarray(batch, dtype=np.float64), np.asarray(draft_length) > 0
        if self.kind not in ("ngram", "suffix"):
            return np.asarray(np.where(drafts, 1.0, 0.0) * np.ones_like(b))
        return np.asarray(np.where(drafts, _NO_MODEL * (1 - (1 - self.proposed_share) ** b), 0.0))

    def tokens(self, lengths: npt.ArrayLike, all_rounds: bool) -> Array:
        """Tokens per round over all rounds, from AL: over the rounds that drafted, or (`all_rounds`) over
        all.
        """
        share = 1.0 if all_rounds or self.kind not in ("ngram", "suffix") else self.proposed_share
        return np.asarray(1 + share * (np.asarray(lengths, dtype=np.float64) - 1))


def draft_shape(mechanism: Mechanism, target: ModelShape) -> ModelShape | None:
    """The drafter as a model of its own; None where no weights are read."""
    kind = mechanism.kind
    if kind == "model":
        return mechanism.model
    if kind == "mtp":
        return _one_layer(target, target.feed_forward[0] if target.is_moe else target.feed_forward[-1])
    if kind == "layer-skip":
        return _scaled(target, mechanism.skip_share)
    if kind in ("eagle3", "dflash", "dspark"):
        layers = 1 if kind == "eagle3" else _BLOCK_LAYERS
        return _head_model(target, layers)
    return None


def _one_layer(target: ModelShape, feed: FeedForward) -> ModelShape:
    attention = dataclasses.replace(max(target.attention, key=lambda a: a.row_width), layers=1)
    # The step also joins the previous hidden state with the embedding: a 2h x h product.
    attention = dataclasses.replace(attention, weights=attention.weights + 2 * target.hidden**2)
    return dataclasses.replace(
        target,
        name="mtp",
        attention=(attention,),
        feed_forward=(dataclasses.replace(feed, layers=1),),
        tied=True,
    )


def _scaled(target: ModelShape, share: float) -> ModelShape:
    def part(layers: int) -> int:
        return max(1, round(layers * share))

    return dataclasses.replace(
        target,
        name="layer-skip",
        tied=True,
        attention=tuple(dataclasses.replace(a, layers=part(a.layers)) for a in target.attention),
        feed_forward=tuple(dataclasses.replace(f, layers=part(f.layers)) for f in target.feed_forward),
    )


def _head_model(target: ModelShape, layers: int) -> ModelShape:
    """A Llama-like head on the target's width; the published heads have 3.5 times that in their
    feed-forward.
    """
    hidden, dim = target.hidden, 128
    heads = max(1, hidden // dim)
    kv = max(1, heads // 4)
    attention = Attention(
        kind="full",
        layers=layers,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        value_dim=dim,
        row_width=2 * kv * dim,
        weights=hidden * dim * (3 * heads + 4 * kv) + 3 * hidden * hidden // layers,
    )
    vocab = min(target.vocab, 32_000) if layers == 1 else target.vocab
    feed = FeedForward(layers, int(3.5 * hidden))
    return ModelShape("head", hidden, vocab, True, (attention,), (feed,), "published heads of this kind")


def _works(
    mechanism: Mechanism, scenario: Scenario, shape: ModelShape, batch: Any, width: Any, context: Any
) -> list[Work]:
    own = mechanism.kind in ("mtp", "layer-skip")
    precision = scenario.precision if own else dataclasses.replace(
        scenario.precision, linear=mechanism.dtype, experts=mechanism.dtype
    )  # fmt: skip
    seen = context if mechanism.window is None else np.minimum(context, mechanism.window)
    return count_work(
        shape, scenario.hardware, batch, width, seen, precision, scenario.layout, scenario.priced_by
    )  # fmt: skip


def draft_works(
    mechanism: Mechanism, scenario: Scenario, batch: npt.ArrayLike, draft_length: npt.ArrayLike,
    context: npt.ArrayLike,
) -> list[tuple[list[Work], Array, Array]]:  # fmt: skip
    """The drafter's passes in a round: (work of one pass, how many such passes, serial steps beside them)."""
    b, ctx = np.asarray(batch, dtype=np.float64), np.asarray(context, dtype=np.float64)
    d = np.asarray(draft_length, dtype=np.float64)
    drafts = (d > 0).astype(np.float64)
    shape = draft_shape(mechanism, scenario.shape)
    if mechanism.kind == "none":
        return []
    if shape is None:  # string match: host time, told in steps of nothing else
        match = (_MATCH_FIXED_S + _MATCH_S * b) / scenario.priced_by.draft_step_s
        return [([], drafts, drafts * match)]
    if mechanism.kind in _SERIAL:
        step = _works(mechanism, scenario, shape, b, 1.0, ctx)
        if mechanism.kind not in ("eagle3", "mtp"):
            return [(step, d, d)]
        first = _works(mechanism, scenario, shape, b, d + 1, ctx)
        return [(first, drafts, drafts), (step, np.maximum(d - 1, 0), np.maximum(d - 1, 0))]
    block = _works(mechanism, scenario, shape, b, float(mechanism.block), ctx)
    serial = 0.125 * d if mechanism.kind == "dspark" else 0.0 * d  # .2-1.3 % of a round for 4 to 16 tokens
    return [(block, drafts, drafts + serial)]


def draft_seconds(
    mechanism: Mechanism, scenario: Scenario, batch: npt.ArrayLike, draft_length: npt.ArrayLike,
    context: npt.ArrayLike,
) -> Array:  # fmt: skip
    """Seconds one round spends drafting; arrays broadcast. Zero where the draft length is zero."""
    c = scenario.priced_by
    no_host = dataclasses.replace(c, host_s=0.0, row_s=0.0)
    total = 0.0 * (np.asarray(batch, dtype=np.float64) + np.asarray(draft_length) + np.asarray(context))
    for works, passes, steps in draft_works(mechanism, scenario, batch, draft_length, context):
        each = price(works, no_host).total_s if works else 0.0
        total = total + passes * each + steps * c.draft_step_s
    return np.asarray(total)


def draft_memory(mechanism: Mechanism, scenario: Scenario) -> tuple[float, float]:
    """(bytes of draft weights, bytes of draft cache per token), over all devices of a replica."""
    if mechanism.kind in ("none", "ngram", "suffix", "layer-skip"):
        return 0.0, 0.0
    shape = draft_shape(mechanism, scenario.shape)
    assert shape is not None, mechanism.kind
    if mechanism.kind == "mtp":
        own = shape.attention_weights + shape.dense_weights
        size = own * weight_bytes(scenario.precision.linear)
        size += shape.expert_weights * weight_bytes(scenario.precision.experts)
    elif mechanism.kind == "model":
        size = shape.parameters * weight_bytes(mechanism.dtype)
    else:
        own = shape.attention_weights + shape.dense_weights + (shape.head_weights if shape.layers == 1 else 0)
        size = own * weight_bytes(mechanism.dtype)
    cache = sum(a.layers * a.row_width / a.compression for a in shape.attention)
    return float(size), float(cache * weight_bytes(scenario.precision.kv))
