"""The target's own first layers draft (LayerSkip, arXiv 2404.16710; self-speculative decoding, arXiv 2309.08168).

A draft pass ends after the first `layers` layers, and the final norm and the head read what is there: no further
weights and no further cache. Drafting starts on the keys and values the target itself wrote, so there is nothing to
catch up with.

Who writes: in `propose` the rows past the committed length of the target's cache, of the first `layers` layers
alone, inside one transaction that is always rolled back. The verify pass computes every row again through all
layers. Keeping the drafted rows would not save a pass a single read of a weight, because its last row has been
through no layer yet; and so the verify pass stays the same whoever drafted.

A model that was not trained to be read early agrees with itself poorly there (measured: `docs/log.md`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.cache import KVCache
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.model import DraftState, Growing, ModelDrafter
from paceline.decode.model.base import ForwardResult, TargetModel
from paceline.decode.model.step import Span, StepInputs, build_inputs
from paceline.errors import InvalidParameter

__all__ = ["EarlyExit", "LayerSkipDrafter"]

_DEFAULT_SHARE = 0.25


class EarlyExit:
    """`target` as it is after its first `layers` layers (None: a quarter of them): a model of its own in all but
    weights and cache.

    Raises InvalidParameter unless at least one layer is run and at least one skipped.
    """

    def __init__(self, target: TargetModel, layers: int | None = None) -> None:
        whole = target.new_cache(1, 1).layers
        layers = max(1, round(_DEFAULT_SHARE * whole)) if layers is None else layers
        if not 1 <= layers < whole:
            raise InvalidParameter(
                "exit layer", layers, f"1 to {whole - 1}", f"This model has {whole} layers; write layer-skip:N."
            )
        self.target, self.layers = target, layers
        self.geometry, self.row_policy = target.geometry, target.row_policy
        self.vocab_width, self.max_positions, self.dtype = target.vocab_width, target.max_positions, target.dtype

    @property
    def weight_bytes(self) -> int:
        """Nothing of its own."""
        return 0

    def new_cache(self, slots: int, limit: int) -> KVCache:
        return self.target.new_cache(slots, limit)

    def forward(
        self, step: StepInputs, cache: KVCache, taps: Seq[int] = (), layers: int | None = None
    ) -> ForwardResult:
        return self.target.forward(step, cache, taps, self.layers if layers is None else layers)


class LayerSkipDrafter:
    """See the module's docstring.

    exit       the target, ended early
    slots      sequences decoded together
    stop_ids   drafting ends behind these
    """

    def __init__(
        self, exit: EarlyExit, *, name: str, slots: int, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        self.name = name
        self.needs = Needs(shares_target=True)
        self.exit = exit
        self._chain = ModelDrafter(
            exit, name=name, max_positions=exit.max_positions, slots=slots, stop_ids=stop_ids
        )
        self._cache: KVCache | None = None
        self._held: set[int] = set()

    def share_target(self, model: TargetModel, cache: KVCache) -> None:
        assert model is self.exit.target, f"{self.name} was made of another target"
        self._cache = cache

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self._held, f"sequence {view.key} began twice"
        self._held.add(view.key)

    def end(self, view: SequenceView) -> None:
        self._held.remove(view.key)

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        """Nothing to learn: the target's cache holds what was committed."""

    def check_idle(self) -> None:
        assert not self._held, f"draft state is held for ended sequences {sorted(self._held)}"

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        cache = self._cache
        assert cache is not None, f"{self.name} has no target cache; the engine shares it at its start"
        growing = []
        for view, budget in zip(views, budgets, strict=True):
            assert view.slot is not None, f"sequence {view.key} has no slot in the target's cache"
            held = cache.committed(view.slot)
            assert held == len(view.tokens) - 1, f"{held} cached of {len(view.tokens)} committed tokens"
            room = min(cache.granted(view.slot) - held, cache.largest_write)
            growing.append(Growing(view, min(budget, room), DraftState(view.slot)))
        active = [g for g in growing if g.budget > 0]
        with cache.transaction() as transaction:  # left without a commit: rolled back
            for g in active:
                transaction.reserve(g.state.slot, g.budget)
            while active:
                self._chain.extend(active, self._pass(active, cache))
                active = [g for g in active if not g.stopped and len(g.drafts) < g.budget]
        return [self._chain.proposal(g) for g in growing]

    def _pass(self, active: list[Growing], cache: KVCache) -> Tensor:
        """The newest token of each sequence through the first layers; logits [sequences, width]."""
        spans = []
        for g in active:
            start = cache.committed(g.state.slot) + len(g.drafts)
            newest = g.drafts[-1] if g.drafts else g.view.tokens[-1]
            spans.append(Span(g.state.slot, start, [newest], limit=g.view.limit))
        inputs = build_inputs(spans, cache.capacity, self.exit.geometry, self.exit.row_policy)
        logits = self.exit.forward(inputs, cache).logits[[first for first, _ in inputs.logits_of]]
        for g, fine in zip(active, logits.isfinite().all(-1).tolist(), strict=True):
            if not fine:  # a row that is not finite would poison the sums of passes that mask it
                cache.erase(g.state.slot, cache.committed(g.state.slot))
        return logits
