"""A draft model with another tokenizer: it reads the text in its own tokens and proposes those both have.

Its distribution is restricted to the tokens both vocabularies have and renormalised, over the target's ids
(token-level intersection, arXiv 2502.05202): options, noise and the reported distribution are then as
for any draft, and exact. What it reads is the committed text, written again by its own tokenizer (`retokenize.py`);
its cache steps back to where two writings part.

It proposes nothing while the text ends inside a character, nor a token of the target that it does not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.cache import KVCache
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.retokenize import JointIds, Retokenizer
from paceline.decode.model.base import ForwardResult, TargetModel
from paceline.decode.model.overlap import Translation
from paceline.decode.model.step import StepInputs

__all__ = ["TranslatedModel", "TranslatingDrafter"]


class TranslatedModel:
    """`model` as it looks through `translation`: it reads joint ids and its logits go by the target's ids.

    vocab_width   ids it can read; its logits have `translation.target_size` columns, -inf for tokens it lacks
    """

    def __init__(self, model: TargetModel, translation: Translation) -> None:
        self.model = model
        self.geometry, self.row_policy = model.geometry, model.row_policy
        self.max_positions, self.dtype = model.max_positions, model.dtype
        self._size = translation.target_size
        self.vocab_width = self._size + model.vocab_width
        pairs = torch.tensor(translation.pairs, device=model.geometry.device)
        self._targets, self._drafts = pairs.unbind(1)
        self._own = torch.arange(-self._size, model.vocab_width, device=pairs.device).clamp_(min=0)
        self._own[self._targets] = self._drafts

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def new_cache(self, slots: int, limit: int) -> KVCache:
        return self.model.new_cache(slots, limit)

    def forward(
        self, step: StepInputs, cache: KVCache, taps: Seq[int] = (), layers: int | None = None
    ) -> ForwardResult:
        assert layers is None, "a translated draft runs whole"
        result = self.model.forward(replace(step, token_ids=self._own[step.token_ids]), cache, taps)
        logits = result.logits.new_full((len(result.logits), self._size), -math.inf)
        logits[:, self._targets] = result.logits[:, self._drafts]
        return ForwardResult(logits, result.hidden)


class TranslatingDrafter:
    """See the module's docstring. Arguments as for `ModelDrafter`; `stop_ids` are the target's."""

    def __init__(
        self,
        model: TargetModel,
        translation: Translation,
        *,
        name: str,
        max_positions: int,
        slots: int,
        stop_ids: frozenset[int] = frozenset(),
        prefill_chunk: int = 512,
    ) -> None:
        self.name = name
        self._joint = JointIds(translation)
        self.model = TranslatedModel(model, translation)
        self._drafter = ModelDrafter(
            self.model,
            name=name,
            max_positions=max_positions,
            slots=slots,
            stop_ids=stop_ids,
            prefill_chunk=prefill_chunk,
            read=lambda view: self._texts[view.key].ids,
        )
        self.needs = replace(self._drafter.needs, tokenizer=True)
        self._texts: dict[int, Retokenizer] = {}

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def own_cache(self) -> KVCache:
        return self._drafter.cache

    def begin(self, view: SequenceView) -> None:
        self._drafter.begin(view)
        self._texts[view.key] = Retokenizer(self._joint)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        lengths = []
        for view, budget in zip(views, budgets, strict=True):
            text = self._texts[view.key]
            text.read(view.tokens)
            lengths.append(budget if text.whole and text.ids else 0)
        return self._drafter.propose(views, lengths)

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        self._drafter.observe(views, verdicts)

    def end(self, view: SequenceView) -> None:
        del self._texts[view.key]
        self._drafter.end(view)

    def check_idle(self) -> None:
        assert not self._texts, f"texts are held for ended sequences {sorted(self._texts)}"
        self._drafter.check_idle()
