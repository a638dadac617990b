"""A mixture of experts whose rows keep their bits: what a row gets depends on no other row's routing.

Each expert's product is over the rows that chose it, padded as the model's `RowPolicy` pads a prompt chunk, so that
how many others chose the same expert does not show (tried like every product). The parts of a row are added in the
order of the experts. Products never span two pieces of a pass.

On disk the experts of a layer are separate weights (`fuse_experts`), or stacked with gate and up apart, as in GGUF
(`join_gate_and_up`); both bring them into the form of Transformers' modules: one weight for all, gate and up joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.attention import by_rows
from paceline.decode.model.features import Routing
from paceline.decode.model.linear import Form, Linear
from paceline.decode.model.spans import RowPolicy
from paceline.decode.model.stored import Stored, stack

__all__ = ["Experts", "fuse_experts", "join_gate_and_up"]


class Experts:
    """router [experts, width]; gate_up [experts, 2 * inner, width]; down [experts, width, inner]."""

    def __init__(
        self,
        routing: Routing,
        router: Stored,
        gate_up: Stored,
        down: Stored,
        activation: Callable[[Tensor], Tensor],
        form: Form,
    ) -> None:
        self.routing, self.activation = routing, activation
        self.router = Linear(router, form=form.of_router)
        self.gate_up = [_expert(gate_up, i, form) for i in range(routing.experts)]
        self.down = [_expert(down, i, form) for i in range(routing.experts)]

    @property
    def products(self) -> list[Linear]:
        """One of each shape."""
        return [self.router, self.gate_up[0], self.down[0]]

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in (self.router, *self.gate_up, *self.down))

    def over(self, x: Tensor, pieces: Sequence[tuple[int, int]], policy: RowPolicy) -> Tensor:
        """x [rows, width] piece by piece; every piece is padded as the policy says."""
        return torch.cat([self._piece(x[low:high], policy) for low, high in pieces])

    def _piece(self, x: Tensor, policy: RowPolicy) -> Tensor:
        chances = self.router(x).float().softmax(-1)
        weights, chosen = chances.topk(self.routing.active, dim=-1)
        if self.routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if not self.routing.whole_weights:
            weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            mine = F.pad(x[rows], (0, 0, 0, policy.padded(len(rows)) - len(rows)))
            gate, up = self.gate_up[expert](mine).chunk(2, dim=-1)
            made = self.down[expert](by_rows(self.activation, gate) * up)[: len(rows)]
            out.index_add_(0, rows, (made * weights[rows, places, None]).to(x.dtype))
        return out


def _expert(weights: Stored, index: int, form: Form) -> Linear:
    return Linear(Stored.of(weights.rows(index, index + 1)[0]), form=form)


_APART = re.compile(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def fuse_experts(tensors: Mapping[str, Stored], config: Any) -> dict[str, Stored]:
    """`tensors` with the experts of each layer as one weight, under the names Transformers' modules use."""
    if config.model_type not in ("mixtral", "qwen3_moe"):
        return dict(tensors)
    parts: dict[tuple[str, str], dict[int, Stored]] = {}
    out: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if match := _APART.fullmatch(name):
            part = _MIXTRAL_NAMES.get(match[3], match[3])
            parts.setdefault((match[1], part), {})[int(match[2])] = tensor
        else:
            out[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for (prefix, part), experts in parts.items():
        if _alike(experts):
            out[f"{prefix}mlp.experts.{part}.weight"] = stack([experts[i] for i in range(len(experts))])
    return join_gate_and_up(out)


def join_gate_and_up(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """`tensors` with stacked experts `gate_proj`, `up_proj` and `down_proj` under the names of the modules."""
    out = dict(tensors)
    for name in [name for name in out if name.endswith(".experts.down_proj.weight")]:
        out[name.removesuffix(".weight")] = out.pop(name)
    for name in [name for name in out if name.endswith(".experts.gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        gate, up = out[name], out.get(f"{stem}up_proj.weight")
        if up is not None and gate.shape == up.shape:
            out[f"{stem}gate_up_proj"] = _gate_up(gate, up)
            del out[name], out[f"{stem}up_proj.weight"]
    return out


def _gate_up(gate: Stored, up: Stored) -> Stored:
    shape = (gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
    return Stored(shape, lambda low, high: torch.cat([gate.rows(low, high), up.rows(low, high)], dim=1))


def _alike(experts: Mapping[int, Stored]) -> bool:
    """None missing and all of one shape; where not, the check of all names and shapes says so."""
    return sorted(experts) == list(range(len(experts))) and len({t.shape for t in experts.values()}) == 1
