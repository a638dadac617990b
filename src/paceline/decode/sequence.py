"""A request and its choices while the engine holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.core.output import DecodeStats, TokenLogprob
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import Drafter, SequenceView
from paceline.decode.stopping import StopChecker
from paceline.decode.verify.leniency import Leniency
from paceline.decode.verify.prefix import PrefixState
from paceline.errors import InvalidParameter

__all__ = ["DraftSettings", "Phase", "Request", "Sequence", "check_tree_size"]


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Per request: who drafts, how far, and by which rule drafts are accepted.

    drafter        a name the engine knows; "none" decodes plainly
    draft_length   tokens a round at most; None leaves the choice to the drafter ("auto")
    verify         acceptance rule
    tree_size      draft tokens a round in all, where proposals may branch; None drafts chains
    relaxed        what `relaxed` takes for likely enough; None is its default, and nothing else goes with other rules
    """

    drafter: str = "none"
    draft_length: int | None = None
    verify: str = "coupled"
    tree_size: int | None = None
    relaxed: Leniency | None = None


def check_tree_size(settings: DraftSettings, drafter: Drafter | None) -> None:
    """Raises InvalidParameter where `tree_size` is no size, or would be without effect or without proof."""
    size, length = settings.tree_size, settings.draft_length
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidParameter("tree_size", size, "a whole number from 1, or nothing for chains")
    if drafter is None or not drafter.needs.trees:
        raise InvalidParameter(
            "tree_size", size, f"nothing where {settings.drafter} drafts", "`suffix` and draft models branch."
        )
    if not length:
        raise InvalidParameter("tree_size", size, "nothing unless draft_length fixes the longest path")
    if size < length:
        raise InvalidParameter("tree_size", size, f"at least draft_length ({length})")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    draft: DraftSettings = field(default_factory=DraftSettings)
    tenant: str = ""


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True)
class Sequence:
    """One choice of a request.

    view       what drafters see; `view.tokens` are the committed tokens
    limit      total tokens (prompt and output) at most
    slot       cache slot while running
    undrafted  the last block failed as a whole: the next round goes without drafts, to see whether they were why
    """

    request: Request
    choice: int
    view: SequenceView
    prefix: PrefixState
    stop: StopChecker
    limit: int
    noise_key: int
    slot: int | None = None
    phase: Phase = Phase.WAITING
    stats: DecodeStats = field(default_factory=DecodeStats)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    cancelled: bool = False
    undrafted: bool = False

    @property
    def scores_prompt(self) -> bool:
        """The first choice brings the log-probabilities of the prompt, where they are asked for."""
        return self.request.params.prompt_logprobs is not None and self.choice == 0

    @property
    def tokens(self) -> list[int]:
        return self.view.tokens

    def start(self, shared: int) -> None:
        """Its slot holds the first `shared` tokens: begin with the prompt, or go on after a preemption."""
        self.phase = Phase.DECODE if shared == self.filled < len(self.tokens) else Phase.PREFILL
        if not self.stats.preemptions:
            self.stats.cached_tokens = shared

    @property
    def filled(self) -> int:
        """Tokens the cache must hold before decoding: the whole prompt, or all but the last after a preemption."""
        return len(self.tokens) - (len(self.tokens) > self.view.prompt_len)

    @property
    def output(self) -> list[int]:
        return self.view.tokens[self.view.prompt_len :]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.view.tokens)
