"""Which tokens of two vocabularies mean the same, for a draft whose tokenizer is not the target's.

Tokens are compared by the bytes they stand for, however each tokenizer spells them. Special tokens and those that
end a text are never taken for one another: they mean what a model was trained on, not their text.

Token-level intersection of two vocabularies: arXiv 2502.05202.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import IncompatibleDraft

__all__ = ["LEAST_SAMPLE_SHARE", "SAMPLE", "HasTokens", "Translation", "find_translation"]

# Below this the target's next token is one the draft cannot say every second time, and most drafts are one token.
LEAST_SAMPLE_SHARE = 0.5

SAMPLE = """The committee met on 14 March 2024 to settle how the river should be crossed; nobody agreed. "Two bridges,"
said the engineer, "or none: what we can't afford is half of each." Prices had risen by 7.5% since the spring.

def mean_length(words: list[str], minimum: int = 0) -> float:
    lengths = [len(word) for word in words if len(word) >= minimum]
    return sum(lengths) / len(lengths) if lengths else 0.0

Das Wetter bleibt schön, aber kühl. La réunion commence à neuf heures. El perro duerme junto a la ventana.
- total: 1,204 items; error_rate=0.003, see https://example.org/report?id=88
"""


class HasTokens(Protocol):
    """A `Checkpoint` or a `CheckpointInfo`."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> TextTokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Translation:
    """Tokens both vocabularies have, and how to go from one to the other.

    pairs          (target id, draft id) of equal bytes, by target id
    target, draft  the tokenizers
    target_size    ids of the target
    share          of the target's ordinary tokens that the draft has
    sample_share   of the tokens of `SAMPLE`, as the target writes it, that the draft has
    """

    pairs: tuple[tuple[int, int], ...]
    target: TextTokenizer
    draft: TextTokenizer
    target_size: int
    share: float
    sample_share: float

    @property
    def overlap(self) -> str:
        """The overlap in words."""
        return (
            f"{len(self.pairs)} tokens mean the same in both: {self.share:.1%} of the target's vocabulary, "
            f"{self.sample_share:.1%} of the tokens of a sample text"
        )


def find_translation(target: HasTokens, draft: HasTokens) -> Translation:
    """The tokens both have. Raises IncompatibleDraft, with the overlap, where they are too few to draft with."""
    assert target.tokenizer is not None and draft.tokenizer is not None
    ours = _by_bytes(target.tokenizer, target.vocab_size, target.eos_token_ids)
    theirs = _by_bytes(draft.tokenizer, draft.vocab_size, draft.eos_token_ids)
    pairs = tuple(sorted((ours[text], theirs[text]) for text in ours.keys() & theirs.keys()))
    known = {own for own, _ in pairs}
    sample = target.tokenizer.backend.encode(SAMPLE, add_special_tokens=False).ids
    found = Translation(
        pairs=pairs,
        target=target.tokenizer,
        draft=draft.tokenizer,
        target_size=target.vocab_size,
        share=len(pairs) / max(len(ours), 1),
        sample_share=sum(token in known for token in sample) / max(len(sample), 1),
    )
    if not pairs or found.sample_share < LEAST_SAMPLE_SHARE:
        raise IncompatibleDraft(
            f"the draft {draft.name} has another tokenizer than {target.name} and too few of its tokens: "
            f"{found.overlap}; {LEAST_SAMPLE_SHARE:.0%} of these are needed."
        )
    return found


def _by_bytes(tokenizer: TextTokenizer, size: int, ends: Set[int]) -> dict[bytes, int]:
    """Bytes -> the ordinary token that stands for them; of several a piece before a raw byte, then the lowest id."""
    special, raw = tokenizer.special_ids | ends, tokenizer.byte_ids
    chosen: dict[bytes, int] = {}
    for token, text in sorted(tokenizer.token_bytes().items(), key=lambda item: (item[0] in raw, item[0])):
        if text and token < size and token not in special:
            chosen.setdefault(text, token)
    return chosen
