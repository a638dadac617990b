"""The contract of every drafter.

A drafter is one file with one class. It sees committed tokens only through `observe`, proposes for any subset
of its sequences in any round, and must survive rounds in which it was not asked. Its state moves in `observe`
alone: two calls of `propose` in a row give the same answer.

The engine calls, for each sequence that has this drafter available:

    begin(view)                      once, when the prompt is known; once more each time it goes on after it was
                                     preempted, with the output so far in its tokens
    propose(views, budgets)          in rounds in which it is chosen; one Proposal per view, at most
                                     budgets[i] tokens on the longest path, and where the view has a
                                     tree_size at most so many in all, with `confidence` and without equal
                                     siblings; else a chain. Fewer or none is always allowed
    observe(views, verdicts)         after every round, chosen or not, when the committed tokens have grown (`auto`
                                     tells a string matcher later: before it asks it, and before the end); a
                                     verdict counts the nodes that were verified, which may be fewer than proposed
    end(view)                        for every begin, on every way out; frees whatever it holds for the sequence
                                     (`view.preempted` where the sequence will go on later)

A new drafter needs its file, a line in `registry.py` and its page in the docs; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from paceline.core.proposal import Proposal, Verdict
from paceline.core.sampling import SamplingParams
from paceline.decode.verify.rules import RULES, Rule

if TYPE_CHECKING:
    from paceline.decode.cache import KVCache
    from paceline.decode.model.base import TargetModel

__all__ = ["Drafter", "KeepsPrefixes", "Needs", "OwnsCache", "SequenceView", "SharesTarget"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter wants from the engine, declared so that the engine can refuse what it cannot give.

    hidden_layers   outputs of these decoder layers (0-based, -1 the last after the final norm) for every
                    committed position, delivered in `SequenceView.hidden`
    own_kv          it keeps a KV cache, counted into the memory budget and checked when idle
    tokenizer       it needs token text
    shares_target   it runs the target itself on the target's cache: see `SharesTarget`
    trees           it can branch where a request asks for it (`SequenceView.tree_size`)
    """

    hidden_layers: tuple[int, ...] = ()
    own_kv: bool = False
    tokenizer: bool = False
    shares_target: bool = False
    trees: bool = False


@dataclass(slots=True)
class SequenceView:
    """A drafter's window on one sequence. Read-only for drafters.

    key        unique while the sequence lives
    tokens     prompt and output, committed only
    prompt_len how many of them are prompt
    params     sampling options: draft under the same ones
    noise_key  key of the request's noise, for drafters that draw with it (see `verify/noise.py`)
    tenant     pools are shared inside one tenant only
    verify     name of the acceptance rule: how drafts are drawn and what a length may depend on (`rule`)
    prefix     the committed prefix as sampling options see it (`verify/prefix.py`), for drafters that draw
    tree_size  draft tokens of a proposal in all, where it may branch; None asks for a chain
    more       where set: asked after each draft with the confidences so far, whether to draft on
    hidden     layer -> [len(tokens) - 1, width] hidden states, for declared `needs.hidden_layers`
    slot       of the sequence in the target's cache while it runs, for drafters that share it
    limit      tokens it may grow to; 0 where nothing is said
    preempted  set while `end` is called on a sequence that will go on: its output is not finished
    """

    key: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    noise_key: int = 0
    tenant: str = ""
    prefix: Any = None
    tree_size: int | None = None
    more: Callable[[Seq[float]], bool] | None = None
    hidden: dict[int, Any] = field(default_factory=dict)
    slot: int | None = None
    limit: int = 0
    verify: str = "coupled"
    preempted: bool = False

    @property
    def rule(self) -> Rule:
        return RULES[self.verify]


@runtime_checkable
class Drafter(Protocol):
    """See the module's docstring."""

    name: str
    needs: Needs

    def begin(self, view: SequenceView) -> None: ...

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]: ...

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None: ...

    def end(self, view: SequenceView) -> None: ...

    def check_idle(self) -> None:
        """Raises AssertionError where state is held for a sequence that has ended."""
        ...


@runtime_checkable
class SharesTarget(Protocol):
    """A drafter with `needs.shares_target`: the engine hands it its own model and cache, once, before any `begin`.

    It may write past the committed length of its sequences' slots, in `propose` alone, inside a transaction it
    leaves without a commit (see `decode/cache.py`).
    """

    def share_target(self, model: TargetModel, cache: KVCache) -> None: ...


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A drafter that keeps state of ended sequences for later ones of their tenant."""

    def clear_prefixes(self) -> None: ...


@runtime_checkable
class OwnsCache(Protocol):
    """A drafter with `needs.own_kv`: its weights and its cache are counted, and the cache gets a budget."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def own_cache(self) -> KVCache: ...
