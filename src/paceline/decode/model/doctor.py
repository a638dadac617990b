"""Does this draft fit this target, on this machine? Answered before any weight is read.

Looks at the two vocabularies token by token, at their padding, at both context lengths, at how heavy the
draft is beside the target, and at the memory for weights, KV of both and the verify workspace at full batch
and context. Every finding says what would go wrong and what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from paceline.decode.memory import LOGIT_COPIES, available_memory_bytes, show_bytes
from paceline.decode.model.checkpoint import CheckpointInfo
from paceline.decode.model.overlap import HasTokens, Translation, find_translation
from paceline.decode.model.precision import BYTES_PER_WEIGHT, floats_of, stock_products
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import IncompatibleDraft, InvalidParameter

__all__ = [
    "Finding",
    "Level",
    "Load",
    "MemoryNeed",
    "PairReport",
    "VocabularyOverlap",
    "available_memory_bytes",
    "check_draft_vocabulary",
    "compare_vocabularies",
    "examine_pair",
    "memory_need",
]

_EXAMPLES = 3
_HEAVY_DRAFT = 0.5


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found and, unless it is fine, what to do."""

    topic: str
    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What the pair shall serve: sequences at once, tokens of context each, D, and in which numbers."""

    batch: int
    context_tokens: int
    draft_length: int
    target_precision: str = "bfloat16"
    draft_precision: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "context_tokens"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "a whole number from 1")
        if self.draft_length < 0:
            raise InvalidParameter("draft_length", self.draft_length, "a whole number from 0")


@dataclass(frozen=True, slots=True)
class VocabularyOverlap:
    """Two vocabularies compared id by id.

    shared       ids that stand for the same bytes in both
    differing    ids both have that stand for different bytes
    only_target, only_draft   ids just one of them has
    same_text    tokens of the target whose text the draft has too, under whatever id
    examples     (id, target's text, draft's text) of some differing ids
    """

    shared: int
    differing: int
    only_target: int
    only_draft: int
    same_text: int
    examples: tuple[tuple[int, str, str], ...]

    @property
    def compatible(self) -> bool:
        """Every id both can emit means the same text."""
        return self.differing == 0 and self.shared > 0

    @property
    def share(self) -> float:
        """Same id and text, over the ids of the target."""
        total = self.shared + self.differing + self.only_target
        return self.shared / total if total else 0.0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a pair needs at full load."""

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    verify_workspace: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class PairReport:
    """What was found about a target and its draft (None: a drafter without a model)."""

    target: str
    draft: str | None
    findings: tuple[Finding, ...]
    memory: MemoryNeed

    @property
    def worst(self) -> Level:
        levels = {finding.level for finding in self.findings}
        return next(level for level in (Level.ERROR, Level.WARN, Level.OK) if level in levels | {Level.OK})

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; bytes stay bytes."""
        return asdict(self) | {
            "findings": [asdict(finding) | {"level": str(finding.level)} for finding in self.findings],
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "worst": str(self.worst),
        }


def compare_vocabularies(target: TextTokenizer, draft: TextTokenizer) -> VocabularyOverlap:
    """The two tokenizers' ids by the bytes they stand for; padding rows have no token to compare."""
    ours, theirs = target.token_bytes(), draft.token_bytes()
    both = ours.keys() & theirs.keys()
    differing = sorted(i for i in both if ours[i] != theirs[i])
    texts = set(theirs.values())
    return VocabularyOverlap(
        shared=len(both) - len(differing),
        differing=len(differing),
        only_target=len(ours) - len(both),
        only_draft=len(theirs) - len(both),
        same_text=sum(text in texts for text in ours.values()),
        examples=tuple((i, _shown(ours[i]), _shown(theirs[i])) for i in differing[:_EXAMPLES]),
    )


def check_draft_vocabulary(target: HasTokens, draft: HasTokens) -> Translation | None:
    """None where every token id both can emit means the same text, else how to translate one into the other.

    Models without any tokenizer have ids alone, which agree where there are equally many. Raises IncompatibleDraft
    where the vocabularies overlap too little to draft.
    """
    if target.tokenizer is None and draft.tokenizer is None and target.vocab_size == draft.vocab_size:
        return None
    if target.tokenizer is None or draft.tokenizer is None:
        raise IncompatibleDraft(
            f"the vocabularies of {target.name} and {draft.name} cannot be compared, since "
            f"{target.name if target.tokenizer is None else draft.name} has no tokenizer; put its tokenizer "
            "files beside its weights."
        )
    if compare_vocabularies(target.tokenizer, draft.tokenizer).compatible:
        return None
    try:
        return find_translation(target, draft)
    except IncompatibleDraft as error:
        raise IncompatibleDraft(f"{error} {_OTHER_DRAFT}") from error


_OTHER_DRAFT = "Use a draft of the same family and tokenizer, or a drafter without a model (ngram, suffix)."


def memory_need(target: CheckpointInfo, draft: CheckpointInfo | None, load: Load) -> MemoryNeed:
    """Bytes at full batch and context; the workspace is batch * (D + 1) float32 rows of the vocabulary."""
    draft_tokens = 0 if draft is None else min(load.context_tokens, draft.max_positions)
    rows = load.batch * (load.draft_length + 1)
    kept, draft_kept = (floats_of(name).itemsize for name in (load.target_precision, load.draft_precision))
    return MemoryNeed(
        target_weights=target.weight_bytes(BYTES_PER_WEIGHT[load.target_precision]),
        draft_weights=0 if draft is None else draft.weight_bytes(BYTES_PER_WEIGHT[load.draft_precision]),
        target_kv=load.batch * target.kv_bytes(load.context_tokens, kept),
        draft_kv=0 if draft is None else load.batch * draft.kv_bytes(draft_tokens, draft_kept),
        verify_workspace=rows * target.config.vocab_size * 4 * LOGIT_COPIES,
    )


def examine_pair(
    target: CheckpointInfo,
    draft: CheckpointInfo | None,
    load: Load,
    available_bytes: int | None,  # None: not known on this machine
    exit_layers: int | None = None,  # layers that draft, where the target's own do
    uncompiled: tuple[str | None, str | None] = (None, None),  # why target and draft do without the compiled decoder
    on_cpu: bool = True,
) -> PairReport:
    """Everything there is to say about running `draft` for `target` under `load`."""
    need = memory_need(target, draft, load)
    findings = [_context(target, load)]
    if draft is not None:
        findings += [_vocabulary(target, draft), _padding(target, draft), _draft_context(target, draft, load)]
        findings.append(_weight(target, draft, load))
    if exit_layers is not None:
        findings.append(_early_exit(target, exit_layers))
    for model, precision, missing in zip(
        (target, draft), (load.target_precision, load.draft_precision), uncompiled, strict=True
    ):
        if model is not None and missing is not None:
            findings.append(_decoder(model, precision, missing, on_cpu))
    findings.append(_memory(need, load, available_bytes))
    return PairReport(target.name, None if draft is None else draft.name, tuple(findings), need)


def _vocabulary(target: CheckpointInfo, draft: CheckpointInfo) -> Finding:
    try:
        translation = check_draft_vocabulary(target, draft)
    except IncompatibleDraft as error:
        text, _, _ = str(error).partition(f" {_OTHER_DRAFT}")
        return Finding("vocabulary", Level.ERROR, text, _OTHER_DRAFT)
    if target.tokenizer is None or draft.tokenizer is None:
        text = f"neither model has a tokenizer; both have {target.vocab_size} ids, taken to mean the same."
        return Finding("vocabulary", Level.WARN, text, "Put the tokenizer files beside the weights.")
    overlap = compare_vocabularies(target.tokenizer, draft.tokenizer)
    if translation is not None:
        examples = "; ".join(f"id {i} is {ours!r} and {theirs!r}" for i, ours, theirs in overlap.examples)
        text = (
            f"another tokenizer ({overlap.differing} ids mean another text: {examples}); drafts are translated: "
            f"{translation.overlap}."
        )
        return Finding("vocabulary", Level.WARN, text, "A draft of the same tokenizer is accepted more often.")
    if overlap.only_target or overlap.only_draft:
        text = (
            f"the {overlap.shared} ids both have mean the same; {overlap.only_target} ids only the target "
            f"has are never proposed, {overlap.only_draft} only the draft has are never accepted."
        )
        return Finding("vocabulary", Level.OK, text)
    return Finding("vocabulary", Level.OK, f"all {overlap.shared} ids mean the same text in both.")


def _padding(target: CheckpointInfo, draft: CheckpointInfo) -> Finding:
    rows = {"target": target.config.vocab_size, "draft": draft.config.vocab_size}
    sizes = {"target": target.vocab_size, "draft": draft.vocab_size}
    padded = [f"{who}: {rows[who]} rows for {sizes[who]} ids" for who in rows if rows[who] > sizes[who]]
    if not padded:
        return Finding("padding", Level.OK, "no head has padding rows.")
    return Finding("padding", Level.OK, f"padding rows are never proposed or emitted ({'; '.join(padded)}).")


def _context(target: CheckpointInfo, load: Load) -> Finding:
    if load.context_tokens > target.max_positions:
        return Finding(
            "context",
            Level.ERROR,
            f"{load.context_tokens} tokens of context were asked for; {target.name} was made for "
            f"{target.max_positions}.",
            f"Ask for at most {target.max_positions}.",
        )
    text = f"{load.context_tokens} of the {target.max_positions} positions of {target.name}."
    return Finding("context", Level.OK, text)


def _draft_context(target: CheckpointInfo, draft: CheckpointInfo, load: Load) -> Finding:
    if draft.max_positions >= load.context_tokens:
        text = f"the draft has {draft.max_positions} positions, enough for {load.context_tokens} tokens."
        return Finding("draft context", Level.OK, text)
    return Finding(
        "draft context",
        Level.WARN,
        f"the draft was made for {draft.max_positions} positions, the target for {target.max_positions}: "
        f"from token {draft.max_positions} on it proposes nothing and decoding goes on without it.",
        "For long contexts add a drafter without a model (--draft ngram) or take a draft with a longer one.",
    )


def _early_exit(target: CheckpointInfo, layers: int) -> Finding:
    whole = target.config.num_hidden_layers
    if not layers < whole:
        text = f"{layers} layers cannot draft for a target of {whole}; at least one must be skipped."
        return Finding("exit layer", Level.ERROR, text, f"Write layer-skip:N with N from 1 to {whole - 1}.")
    text = f"{layers} of {whole} layers draft; the model must have been trained to be read there."
    return Finding("exit layer", Level.OK, text)


def _weight(target: CheckpointInfo, draft: CheckpointInfo, load: Load) -> Finding:
    plain = target.parameters_read * BYTES_PER_WEIGHT[load.target_precision]
    ratio = draft.parameters_read * BYTES_PER_WEIGHT[load.draft_precision] / plain
    text = f"a draft token reads {ratio:.0%} of the bytes a plain step reads."
    if ratio > _HEAVY_DRAFT:
        return Finding(
            "draft weight",
            Level.WARN,
            f"{text} Drafting that costs this much pays only where nearly every draft is accepted.",
            "Take a smaller draft, or a lower --draft-dtype.",
        )
    return Finding("draft weight", Level.OK, text)


def _decoder(model: CheckpointInfo, precision: str, missing: str, on_cpu: bool) -> Finding:
    if precision == "float32":
        return Finding("decoder", Level.OK, f"{model.name} in float32 runs on PyTorch's products.")
    if not missing:
        return Finding("decoder", Level.OK, f"{model.name} in {precision} is compiled for this processor.")
    if precision in ("int8", "int4") and not on_cpu:
        text = f"{model.name} in {precision} runs on a CPU alone."
        return Finding("decoder", Level.ERROR, text, "Use bfloat16 or float32.")
    text = f"{model.name} in {precision} runs on {stock_products(precision)}, not compiled: {missing}."
    return Finding("decoder", Level.OK, text)


def _memory(need: MemoryNeed, load: Load, available_bytes: int | None) -> Finding:
    parts = ", ".join(f"{name.replace('_', ' ')} {show_bytes(value)}" for name, value in asdict(need).items() if value)
    text = f"{show_bytes(need.total)} at full batch and context ({parts})"
    if available_bytes is None:
        return Finding("memory", Level.WARN, f"{text}; how much is free here is not known.", "Compare it yourself.")
    text = f"{text}; {show_bytes(available_bytes)} are free."
    if need.total > available_bytes:
        advice = "Lower --batch or --context, use bfloat16, or take a smaller draft."
        return Finding("memory", Level.ERROR, f"it does not fit: {text}", advice)
    each = (need.target_kv + need.draft_kv) // load.batch
    fits = (available_bytes - need.total + need.target_kv + need.draft_kv) // max(each, 1)
    return Finding("memory", Level.OK, f"{text} {fits} sequences of {load.context_tokens} tokens would fit.")


def _shown(text: bytes) -> str:
    return text.decode("utf-8", errors="backslashreplace")
