"""Rotary position embeddings: cosines and sines of every position, by kind of layer.

The frequencies of every scaling are Transformers' own functions (linear, dynamic, yarn, llama3, longrope,
proportional). Two of the scalings depend on the length of the text there, and keys that are cached must not:

dynamic   begins past `max_position_embeddings`, where a text ends here; up to there it is the plain rotation
longrope  has a second set of frequencies for texts longer than the original context. Transformers changes to it,
          and computes the cache anew, when a text grows past that. Here a sequence has one of the two for life, by
          the length it may grow to (prompt and `max_tokens`, within the context): that depends on its request
          alone, not on its batch or its drafts. The texts are Transformers' where a sequence stays within the
          original context or starts past it.

A table is computed in pieces of one thread each: split over threads, what lies at a cut has other last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.decode.model.features import head_width
from paceline.decode.model.step import KV_BLOCK, StepInputs
from paceline.errors import UnsupportedModel

__all__ = ["Rotations"]

_PIECE = 64  # positions computed at once


class Rotations:
    """cos and signed sin [rows, 1, rotary width]: rotate(x) = x * cos + swap_halves(x) * sin.

    The sign of Transformers' rotate_half is in the sine. `layer_types` are the keys into the config's rotations,
    None where it has one for all. `long_from` is the length past which a sequence turns by the second set.
    """

    def __init__(
        self, config: Any, layer_types: Sequence[str | None], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device = dtype, device
        self._frequencies = {kind: _frequencies(config, kind) for kind in dict.fromkeys(layer_types)}
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._positions = 0
        self.long_from = _long_from(config, layer_types)

    def reserve(self, positions: int) -> None:
        """Have tables for `positions` tokens."""
        wanted = -(-positions // KV_BLOCK) * KV_BLOCK
        if wanted > self._positions:
            self._positions = wanted
            self._tables = {kind: self._table(*set_) for kind, set_ in self._frequencies.items()}

    def turns(self, step: StepInputs) -> dict[str | None, tuple[Tensor, Tensor]]:
        """cos and sin of every row of a pass, by kind of layer."""
        rows = step.positions if step.turned_long is None else 2 * step.positions + step.turned_long
        return {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in self._tables.items()}

    def table(self, kind: str | None) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position there are tables for."""
        return self._tables[kind]

    def _table(self, sets: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Row `sets * p + s` is position p by set s."""
        width = 2 * sets.shape[1]
        sign = torch.cat([-torch.ones(width // 2), torch.ones(width // 2)])
        cosines, sines = [], []
        for start in range(0, self._positions, _PIECE):
            angles = torch.arange(start, start + _PIECE)[:, None, None].float() * sets
            angles = torch.cat((angles, angles), dim=-1).flatten(0, 1)
            cosines.append(angles.cos() * scaling)
            sines.append(angles.sin() * scaling * sign)
        return self._put(torch.cat(cosines)), self._put(torch.cat(sines))

    def _put(self, table: Tensor) -> Tensor:
        return table[:, None].to(self._dtype).to(self._device)


def _parameters(config: Any, kind: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters if kind is None else config.rope_parameters[kind]
    return parameters


def _frequencies(config: Any, kind: str | None) -> tuple[Tensor, float]:
    """[sets, rotary width / 2] radians per token, and what cosines and sines are multiplied by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(config, kind)
    scaling = parameters.get("rope_type", "default")
    if config.model_type != "phi3" and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor is not supported for {config.model_type} models")
    if scaling == "default":
        width = int(head_width(config) * parameters.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, width, 2, dtype=torch.float) / width
        return (1.0 / parameters["rope_theta"] ** powers)[None], 1.0
    if scaling not in ROPE_INIT_FUNCTIONS:
        allowed = ", ".join(sorted(["default", *ROPE_INIT_FUNCTIONS]))
        raise UnsupportedModel(f"rotary scaling {scaling!r} is not supported; allowed: {allowed}")
    compute = ROPE_INIT_FUNCTIONS[scaling]
    where = {} if kind is None else {"layer_type": kind}
    first, factor = compute(config, None, **where)
    if not _has_two_sets(parameters):
        return first[None], factor
    long = int(parameters["original_max_position_embeddings"]) + 1
    second, factor = compute(config, None, seq_len=long, **where)
    return torch.stack([first, second]), factor


def _has_two_sets(parameters: dict[str, Any]) -> bool:
    return (
        parameters.get("rope_type") == "longrope" and parameters["short_factor"] != parameters["long_factor"]
    )


def _long_from(config: Any, kinds: Sequence[str | None]) -> int | None:
    found = [p for p in (_parameters(config, kind) for kind in dict.fromkeys(kinds)) if _has_two_sets(p)]
    if found and len(set(kinds)) > 1:
        raise UnsupportedModel("longrope in a model whose layers turn differently is not supported")
    return int(found[0]["original_max_position_embeddings"]) if found else None
