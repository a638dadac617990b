"""When a choice ends, and where its text ends: committed tokens are looked at one by one, in order.

Several tokens are committed in one round; the first that ends the choice ends it, and nothing after it exists
(cases SD-01 to SD-04). A stop is looked for before the length cap, at every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.output import FinishReason
from paceline.core.sampling import SamplingParams

__all__ = ["StopChecker", "TextPieces"]


class TextPieces(Protocol):
    """Incremental detokenisation; what is pushed and flushed, joined, is the decoded whole."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopChecker:
    """Follows one choice token by token. `text` grows by what is certain to stay.

    pieces     None where no tokenizer is at hand: then there is no text, and stop strings are refused earlier
    limit      output tokens at most (max_tokens and the room in the context, the smaller)
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        limit: int,
        new_pieces: Callable[[], TextPieces] | None,
    ) -> None:
        ends = set(params.stop_token_ids)
        self._ends = ends if params.ignore_eos else ends | eos_token_ids
        self._stop = params.stop
        self._hold = max((len(s) for s in params.stop), default=1) - 1
        self._limit = limit
        self._pieces = new_pieces() if new_pieces is not None else None
        self._pending = ""
        self.count = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_id: int) -> str:
        """Take one committed token; returns the text that is now certain. Sets `finish_reason` when it ends."""
        assert self.finish_reason is None, "a token after the end"
        self.count += 1
        ended = token_id in self._ends
        if self._pieces is not None and not ended:
            self._pending += self._pieces.push(token_id)
        if self._cut_at_stop():
            self.finish_reason = "stop"
            return self._take(0)
        if ended or self.count >= self._limit:
            self.finish_reason = "stop" if ended else "length"
            return self.flush()
        return self._take(self._held() if self._stop else 0)

    def flush(self) -> str:
        """Whatever text is left; a stop string completed by it still cuts."""
        if self._pieces is not None:
            self._pending += self._pieces.flush()
        if self._cut_at_stop():
            self.finish_reason = "stop"
        return self._take(0)

    def _cut_at_stop(self) -> bool:
        if not self._stop:
            return False
        found = [at for s in self._stop if (at := self._pending.find(s)) >= 0]
        if not found:
            return False
        self._pending = self._pending[: min(found)]
        return True

    def _held(self) -> int:
        """How many characters at the end might begin a stop string."""
        for size in range(min(self._hold, len(self._pending)), 0, -1):
            tail = self._pending[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0

    def _take(self, hold: int) -> str:
        if not hold:
            text, self._pending = self._pending, ""
            return text
        cut = len(self._pending) - hold
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text
