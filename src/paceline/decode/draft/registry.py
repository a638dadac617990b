"""The drafters by name, and the one way to write them: `--draft KIND[:MODEL]`.

    none              plain decoding
    ngram, suffix     string matching, no model
    auto              the best of `suffix` and of every other `--draft`, chosen each round
    layer-skip[:N]    the target's own first N layers; a quarter of them where N is not given
    model:PATH        a smaller model; a bare path or id means the same

A new drafter needs its file, a line here and its page in the docs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.decode.draft.auto import AutoDrafter, Candidate
from paceline.decode.draft.base import Drafter
from paceline.decode.draft.ngram import NgramDrafter
from paceline.decode.draft.suffix import SuffixDrafter
from paceline.decode.model.fetch import KNOWN_MODELS
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.control.cost import LiveCost
from paceline.plan.control.records import AUTO_MATCHER, ControlOptions

__all__ = [
    "KINDS",
    "MODEL_FREE",
    "PLANNED_KINDS",
    "DraftSpec",
    "make_auto",
    "make_model_free",
    "parse_draft",
]

MODEL_FREE: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
KINDS = ("none", "auto", *MODEL_FREE, "layer-skip", "model")
PLANNED_KINDS = ("eagle3", "mtp", "dflash", "dspark")  # `plan` knows them, the engine not yet


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One `--draft`: a kind, for `model` the path or id of its weights, for `layer-skip` how many layers draft."""

    kind: str
    model: str | None = None
    layers: int | None = None

    def __str__(self) -> str:
        detail = self.model if self.layers is None else self.layers
        return self.kind if detail is None else f"{self.kind}:{detail}"


def parse_draft(text: str) -> DraftSpec:
    """`KIND`, `KIND:MODEL`, or a bare path or id as `model:`: what holds a slash, a dot or a backslash,
    lies in the current folder, or is a model known by name.

    Raises `InvalidParameter` for an unknown kind, with the nearest names, for a model where none is taken and
    where one is missing; `UsageError` for a kind that only the planner knows.
    """
    kind, colon, model = text.partition(":")
    if kind in PLANNED_KINDS:
        raise UsageError(
            f"the drafter {kind!r} can be planned for and this engine cannot run it yet; "
            f"allowed here: {', '.join(KINDS)}."
        )
    if kind == "model":
        if not model:
            raise InvalidParameter(
                "draft", text, "model:PATH or model:ID", "Add the path of the draft model."
            )
        return DraftSpec("model", model)
    if kind == "layer-skip" and colon:
        if not model.isdecimal() or int(model) < 1:
            raise InvalidParameter("draft", text, "layer-skip or layer-skip:N with N a whole number from 1")
        return DraftSpec(kind, layers=int(model))
    if kind in KINDS:
        if colon:
            raise InvalidParameter("draft", text, f"{kind!r} without a model", f"Write {kind!r} alone.")
        return DraftSpec(kind)
    here = 0 < len(text) < 256 and Path(text).exists()
    if here or any(mark in text for mark in "/\\.") or text in KNOWN_MODELS:
        return DraftSpec("model", text)
    near = difflib.get_close_matches(kind, (*KINDS, *PLANNED_KINDS), n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "A model is given as model:PATH."
    raise InvalidParameter("draft", text, f"KIND[:MODEL] with KIND one of {', '.join(KINDS)}", hint)


def make_auto(
    others: Sequence[Candidate] = (),
    cost: LiveCost | None = None,
    options: ControlOptions | None = None,
) -> AutoDrafter:
    """`auto` over the string matcher that it asks by itself and `others`, of which one may take its place."""
    given = {candidate.drafter.name for candidate in others}
    free = [] if AUTO_MATCHER in given else [Candidate(make_model_free(AUTO_MATCHER))]
    return AutoDrafter([*free, *others], cost, options)


def make_model_free(kind: str) -> Drafter:
    """A fresh drafter of a kind that needs no model."""
    if kind not in MODEL_FREE:
        raise InvalidParameter("draft kind", kind, f"one of {', '.join(MODEL_FREE)}")
    return MODEL_FREE[kind]()
