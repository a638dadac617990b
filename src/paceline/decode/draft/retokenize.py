"""The text of a sequence as another tokenizer writes it, kept while it grows.

Tokens become bytes, bytes become text as soon as their characters are whole, and text becomes the draft's tokens. New
text can change the last tokens of what stands before it, so the last `_TAIL` of them are written again, and what
the two writings have in common is kept. Where they do not meet again, everything is written anew.

Special tokens of the target are read as the draft's where it has one of the same text; the others are left out.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.decode.model.overlap import Translation
from paceline.decode.model.tokenizer import TextTokenizer

__all__ = ["JointIds", "Retokenizer"]

_TAIL = 32  # tokens written again when text is added
_MEET = 8  # tokens in a row that both writings must have, for what lies before to be kept


class JointIds:
    """One numbering for both vocabularies: the target's id where both have the token, else `target_size` + the draft's.

    So a draft that was proposed under the target's id and is read back in the draft's own writing is the same token.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self._of_draft = {draft: target for target, draft in translation.pairs}
        self.prefix = [self.of_draft(token) for token in translation.draft.prefix_ids]
        self.text = _readable(translation.target, translation.draft)

    def of_draft(self, token: int) -> int:
        return self._of_draft.get(token, self.translation.target_size + token)


def _readable(target: TextTokenizer, draft: TextTokenizer) -> Mapping[int, bytes]:
    """Target id -> the bytes the draft shall read for it."""
    markers = {draft.token_bytes()[token] for token in draft.special_ids}
    return {
        token: text if token not in target.special_ids or text in markers else b""
        for token, text in target.token_bytes().items()
    }


class Retokenizer:
    """The writing of one sequence. `ids` are joint ids (`JointIds`), the draft's beginning-of-text in front."""

    def __init__(self, joint: JointIds) -> None:
        self._joint = joint
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0
        self._text = ""
        self.ids: list[int] = list(joint.prefix)
        self._starts: list[int] = [0] * len(joint.prefix)  # the character at which each of `ids` begins

    @property
    def whole(self) -> bool:
        """Whether the text does not end inside a character."""
        return not self._decoder.getstate()[0]

    def read(self, tokens: Seq[int]) -> None:
        """Take in what `tokens`, all committed target tokens, have more than at the last call."""
        first = tokens[: len(self._joint.translation.target.prefix_ids)]
        if not self._seen and tuple(first) == self._joint.translation.target.prefix_ids:
            self._seen = len(first)
        new = b"".join(self._joint.text.get(token, b"") for token in tokens[self._seen :])
        self._seen = len(tokens)
        if text := self._decoder.decode(new):
            self._text += text
            self._write()

    def _write(self) -> None:
        """Bring `ids` up to `_text`."""
        anchor = len(self.ids) - _TAIL
        if anchor > len(self._joint.prefix):
            ids, starts = self._encode(self._starts[anchor])
            meeting = self._meet(anchor, ids, starts)
            if meeting is not None:
                old, new = meeting
                self.ids[old:], self._starts[old:] = ids[new:], starts[new:]
                return
        ids, starts = self._encode(0)
        prefix = self._joint.prefix
        if ids[: len(prefix)] != prefix:
            ids, starts = prefix + ids, [0] * len(prefix) + starts
        self.ids, self._starts = ids, starts

    def _encode(self, begin: int) -> tuple[list[int], list[int]]:
        """Joint ids of the text from character `begin` on, and where each begins in the whole text."""
        written = self._joint.translation.draft.backend.encode(self._text[begin:], add_special_tokens=False)
        return [self._joint.of_draft(i) for i in written.ids], [begin + low for low, _ in written.offsets]

    def _meet(self, anchor: int, ids: list[int], starts: list[int]) -> tuple[int, int] | None:
        """Where the old writing (from `anchor` on) and the new one first go the same way: (index, index of `ids`).

        The first token of the new writing is not taken: it may owe itself to where the text was cut.
        """
        places = {start: new for new, start in reversed(list(enumerate(starts))) if new}
        for old in range(anchor + 1, len(self.ids) - _MEET + 1):
            new = places.get(self._starts[old])
            if new is None or self._starts[old - 1] == self._starts[old]:
                continue
            if ids[new : new + _MEET] == self.ids[old : old + _MEET]:
                return old, new
        return None
