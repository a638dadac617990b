"""From `--draft` to drafters: parsed, loaded, checked against the target, and `auto` over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.decode.cache import KVCache
from paceline.decode.draft.auto import AutoDrafter, Candidate
from paceline.decode.draft.base import Drafter, SequenceView, SharesTarget
from paceline.decode.draft.layer_skip import EarlyExit, LayerSkipDrafter
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.registry import MODEL_FREE, DraftSpec, make_model_free, parse_draft
from paceline.decode.draft.translate import TranslatingDrafter
from paceline.decode.model.base import TargetModel
from paceline.decode.model.checkpoint import Checkpoint
from paceline.decode.model.overlap import Translation
from paceline.decode.pass_cost import live_cost, time_passes
from paceline.errors import UsageError
from paceline.plan.control.cost import Around, StepTimes
from paceline.plan.control.from_probe import draft_steps, pass_steps, teach
from paceline.plan.control.records import asked_by_auto
from paceline.plan.probe_file import ProbeFile

__all__ = ["DraftModel", "DrafterSet", "begin", "build_drafters", "check_needs", "parse_drafts", "share_target"]


@dataclass(slots=True)
class DrafterSet:
    """drafters   by name, for requests that fix their draft length
    default    the name requests use that ask for nothing
    auto       the controller's hands, over those drafters; None where every request fixes its draft length
    """

    drafters: dict[str, Drafter]
    default: str
    auto: AutoDrafter | None = None

    @property
    def autos(self) -> list[AutoDrafter]:
        """`auto`, and others like it under names of their own."""
        others = [d for d in self.drafters.values() if isinstance(d, AutoDrafter) and d is not self.auto]
        return others if self.auto is None else [self.auto, *others]


def begin(drafter: Drafter, view: SequenceView, asked: str) -> None:
    """Begin a sequence whose request asked for the drafter `asked`: where lengths are chosen, for it alone."""
    if isinstance(drafter, AutoDrafter) and any(d.name == asked for d in drafter.drafters):
        drafter.begin(view, only=asked)
    else:
        drafter.begin(view)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft that has been checked against the target; `translation` where its tokenizer is another."""

    checkpoint: Checkpoint
    model: TargetModel
    translation: Translation | None = None


def check_needs(drafters: Mapping[str, Drafter], layers: int, text: bool) -> None:
    """Raises UsageError where a drafter wants what a target of so many layers, with or without text, cannot give."""
    for name, drafter in drafters.items():
        for layer in drafter.needs.hidden_layers:
            if not -1 <= layer < layers:
                raise UsageError(
                    f"the drafter {name} needs the hidden states of layer {layer}; this model has layers "
                    f"0 to {layers - 1}, or -1 after the final norm. Use the drafter made for it."
                )
        if drafter.needs.tokenizer and not text:
            raise UsageError(f"the drafter {name} needs token text, and this model has no tokenizer; use another")


def share_target(drafters: Iterable[Drafter], model: TargetModel, cache: KVCache) -> None:
    """Hand model and cache to those that declare they share them."""
    for drafter in drafters:
        if drafter.needs.shares_target:
            assert isinstance(drafter, SharesTarget), f"{drafter.name} shares the target and takes none"
            drafter.share_target(model, cache)


def parse_drafts(texts: Sequence[str]) -> list[DraftSpec]:
    """Every `--draft`, `none` standing alone."""
    specs = [parse_draft(text) for text in texts] or [DraftSpec("auto")]
    if len(specs) > 1 and any(spec.kind == "none" for spec in specs):
        raise UsageError("--draft none means no drafter; it cannot stand beside another --draft")
    return list(dict.fromkeys(specs))


def build_drafters(
    specs: Sequence[DraftSpec],
    target: TargetModel,
    *,
    max_batch: int,
    max_draft: int,
    load: Callable[[str], DraftModel],
    stop_ids: frozenset[int] = frozenset(),
    keep: bool = True,
    probe: ProbeFile | None = None,
    around: Callable[[], Around] | None = None,
) -> DrafterSet:
    """Drafters for `specs`. The model-free ones are always there for requests to name.

    `load` brings the draft model of a path; `stop_ids` end the target's texts; `keep` lets draft models go on from what
    they computed for sequences that ended. With a `probe` of this engine the controller starts from what it measured;
    without one passes are timed, and `around` says what a round takes beside them.
    """
    drafters: dict[str, Drafter] = {kind: make_model_free(kind) for kind in MODEL_FREE}
    models: dict[str, TargetModel] = {}
    for spec in specs:
        if spec.kind == "layer-skip":
            models[str(spec)] = early = EarlyExit(target, spec.layers)
            drafters[str(spec)] = LayerSkipDrafter(early, name=str(spec), slots=max_batch, stop_ids=stop_ids)
        if spec.kind == "model":
            assert spec.model is not None
            draft = load(spec.model)
            models[str(spec)] = draft.model
            drafters[str(spec)] = _model_drafter(draft, str(spec), max_batch, stop_ids, keep)
    if [spec.kind for spec in specs] == ["none"]:
        return DrafterSet(drafters, "none")
    timed = {} if probe is None else {d.name: draft_steps(d) for d in probe.drafters}
    asked = asked_by_auto(drafters, {str(spec) for spec in specs})
    candidates = [
        Candidate(
            drafter,
            timed.get(name) or _steps(models.get(name), max_batch),
            named=name not in asked,
        )
        for name, drafter in drafters.items()
    ]
    if probe is not None:
        cost = live_cost(target, max_batch, max_draft, pass_steps(probe))
    else:
        cost = live_cost(target, max_batch, max_draft, around=None if around is None else around())
    auto = AutoDrafter(candidates, cost)
    if probe is not None:
        teach(auto.controller, probe)
    drafters["auto"] = auto
    kinds = [spec for spec in specs if spec.kind != "auto"]
    alone = len(specs) == 1 and len(kinds) == 1
    return DrafterSet(drafters, str(kinds[0]) if alone else "auto", auto)


def _model_drafter(draft: DraftModel, name: str, slots: int, stop_ids: frozenset[int], keep: bool) -> Drafter:
    model, positions = draft.model, draft.checkpoint.max_positions
    if draft.translation is not None:
        return TranslatingDrafter(
            model, draft.translation, name=name, max_positions=positions, slots=slots, stop_ids=stop_ids
        )
    ends = draft.checkpoint.eos_token_ids
    return ModelDrafter(model, name=name, max_positions=positions, slots=slots, stop_ids=ends, keep=keep)


def _steps(model: TargetModel | None, max_batch: int) -> StepTimes | None:
    return None if model is None else time_passes(model, max(64, max_batch))
