"""What a request gives back, whole or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Completion", "DecodeStats", "Delta", "FinishReason", "RequestOutput", "TokenLogprob"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's own log-probability of one emitted token, and its most probable tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class DecodeStats:
    """Counters of one choice. The token that prefill yields belongs to no round.

    rounds         rounds after prefill
    draft_rounds   those in which something was drafted
    drafted        draft tokens proposed (nodes of trees included)
    accepted       drafts kept and emitted
    emitted        tokens emitted in rounds
    emitted_in_draft_rounds   those of rounds that drafted
    cached_tokens  prompt tokens that were not computed but taken from an earlier sequence of the tenant
    preemptions    times it had to yield its memory and was resumed
    saved_s        seconds saved against the plain decoding that was not run, at the controller's live cost of a
                   plain round; below 0 where drafting lost; 0.0 where nothing could be drafted
    """

    rounds: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    emitted_in_draft_rounds: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    saved_s: float = 0.0

    @property
    def acceptance_length(self) -> float | None:
        """AL: tokens a drafting round emits, the target's own included; None where nothing was drafted."""
        return self.emitted_in_draft_rounds / self.draft_rounds if self.draft_rounds else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted over all rounds, plain ones included; None before the first."""
        return self.emitted / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice after a round. `text` may lag behind `token_ids` (UTF-8, possible stop strings).

    `accepted[i]` says whether `token_ids[i]` came from a draft. On the last delta `finish_reason` is set, and
    `text` is complete.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Completion:
    """One choice, finished.

    verify, lossless   the acceptance rule, and whether the text has the target's own distribution under it
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: DecodeStats
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    verify: str = "coupled"
    lossless: bool = True


@dataclass(slots=True)
class RequestOutput:
    """A finished request: its prompt and its choices, in order.

    `prompt_logprobs`, where asked for, has an entry for each prompt token but the first.
    """

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def lossless(self) -> bool:
        """Whether every choice has the target's own distribution."""
        return all(completion.lossless for completion in self.completions)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from earlier requests; further choices take theirs from the first one."""
        return self.completions[0].stats.cached_tokens
