"""What the engine needs of a target model, and a draft-model drafter of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.decode.cache import KVCache
from paceline.decode.model.step import Geometry, RowPolicy, StepInputs

__all__ = ["ForwardResult", "TargetModel"]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`logits` [logit rows (padded), LM head width] float32; `hidden` layer -> [rows, width] where asked for."""

    logits: Tensor
    hidden: dict[int, Tensor]


class TargetModel(Protocol):
    """Weights and a pass over them; stateless, the cache belongs to the caller."""

    geometry: Geometry
    row_policy: RowPolicy
    vocab_width: int
    max_positions: int
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int: ...

    def new_cache(self, slots: int, limit: int) -> KVCache: ...

    def forward(
        self, step: StepInputs, cache: KVCache, taps: Sequence[int] = (), layers: int | None = None
    ) -> ForwardResult:
        """One pass. `layers`: through the first so many layers, then the final norm and the head; the cache of
        the others is left alone.
        """
        ...
