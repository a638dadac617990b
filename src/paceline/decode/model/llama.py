"""The one decoder of all families: one ragged pass with as few operators as PyTorch allows.

Built from Transformers' config and parameter names and held to Transformers' logits by test; what sets a family
apart is data (`features.py`). Q, K and V are one product, gate and up another; the rotation is done in place; keys
and values go to the cache in one copy; the query heads that share a KV head are folded into the query axis, so that
keys and values are read once and never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.cache import KVCache
from paceline.decode.model.attention import ACTIVATIONS, Attention, by_rows, soft_cap
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.experts import Experts
from paceline.decode.model.families import check_family
from paceline.decode.model.features import Routing, features_of
from paceline.decode.model.linear import Form, Int8Weight, Linear
from paceline.decode.model.rope import Rotations
from paceline.decode.model.rows import find_row_policy
from paceline.decode.model.step import AttentionGroup, Geometry, Ring, RowPolicy, StepInputs
from paceline.decode.model.stored import Stored, StoredTensors, join
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["LlamaDecoder"]


@dataclass(frozen=True, slots=True)
class _Dense:
    """down(activation(gate) * up)."""

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    @property
    def products(self) -> list[Linear]:
        return [self.gate_up, self.down]

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def over(self, x: Tensor, pieces: Sequence[tuple[int, int]], policy: RowPolicy) -> Tensor:
        gate, up = self.gate_up.over(x, pieces).chunk(2, dim=-1)
        return self.down.over(by_rows(self.activation, gate) * up, pieces)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Norms are None where the family has none there."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    behind_attention: Tensor | None
    mlp_norm: Tensor
    mlp: _Dense | Experts
    behind_mlp: Tensor | None


class LlamaDecoder:
    """Weights and the pass over them. Stateless but for tables of rotations: the cache belongs to the caller.

    config   a transformers config of one of the `FAMILIES`
    tensors  Hugging Face parameter names; consumed (popped) so that no weight is held twice
    form     of the weights; a head in whole numbers that is the embedding too is held once
    """

    def __init__(
        self, config: Any, tensors: MutableMapping[str, Tensor], device: torch.device, *, form: Form = Form.PACKED
    ) -> None:
        check_family(config, "this")
        self.config = config
        self.features = features = features_of(config)
        self.device = device
        self.heads, self.kv_heads, self.head_dim = features.heads, features.kv_heads, features.head_dim
        self.layers_count = config.num_hidden_layers
        self.max_positions = config.max_position_embeddings
        take = _Taker(StoredTensors.of(tensors), device)
        self.embedding = take("model.embed_tokens.weight")
        self.dtype = self.embedding.dtype
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self.layers = list(pool.map(lambda i: self._layer(take, i, form), range(self.layers_count)))
        self.norm = self._norm_weight(take("model.norm.weight"))
        head = take.optional("lm_head.weight")
        self.head = Linear(Stored.of(self.embedding) if head is None else head, form=form.of_head)
        held = self.head.weight if head is None else None
        self._embeddings_of_head = held if isinstance(held, Int8Weight) else None
        if self._embeddings_of_head is not None:
            self.embedding = self.embedding.new_empty(0)
        take.finish()
        self.vocab_width = self.head.out_features
        self.rotations = Rotations(config, features.layer_types, self.dtype, device)
        ring = None if features.window is None else Ring.holding(features.window)
        share, long_from = self.heads // self.kv_heads, self.rotations.long_from
        self.geometry = Geometry(self.kv_heads, share, self.dtype, device, ring, long_from)
        self.attention = Attention(features.attention_scale, features.attention_cap)
        kinds = {sparse: self.layers[i] for i, sparse in enumerate(features.sparse)}
        products = [self.layers[0].qkv, self.layers[0].out]
        products += [product for layer in kinds.values() for product in layer.mlp.products]
        self.row_policy = find_row_policy([*products, self.head], self.geometry, self.head_dim, self.attention)

    @property
    def weight_bytes(self) -> int:
        layers = sum(m.nbytes for x in self.layers for m in (x.qkv, x.out, x.mlp))
        return layers + self.head.nbytes + self.embedding.numel() * self.embedding.element_size()

    def new_cache(self, slots: int, limit: int) -> KVCache:
        self.rotations.reserve(limit)
        ring = self.geometry.ring
        rings = [ring if windowed else None for windowed in self.features.windowed]
        return KVCache(self.layers_count, self.kv_heads, self.head_dim, slots, limit, self.dtype, self.device, rings)

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, cache: KVCache, taps: Sequence[int] = (), layers: int | None = None
    ) -> ForwardResult:
        """Run one pass, writing keys and values to the cache rows the step names.

        `taps` are layers whose output to return (-1: after the final norm); `layers`: only the first so many run.
        """
        x = self._embed(step.token_ids)
        if (scale := self.features.embedding_scale) is not None:
            x = x * torch.tensor(scale, dtype=self.dtype)
        turns = self.rotations.turns(step)
        hidden: dict[int, Tensor] = {}
        run = self.layers[:layers]
        unread = not taps and step.wanted is not None and len(step.wanted) == 0
        for index, layer in enumerate(run):
            turn = turns[self.features.layer_types[index]]
            qkv = self._keys_values(index, self._norm(x, layer.input_norm), turn, step, cache)
            if unread and index == len(run) - 1:
                break  # of a chunk in the middle of a prompt only the keys and values are of use
            mixed = self._attention(index, qkv, step, cache)
            x = x + (mixed if layer.behind_attention is None else self._norm(mixed, layer.behind_attention))
            made = layer.mlp.over(self._norm(x, layer.mlp_norm), step.pieces, self.row_policy)
            x = x + (made if layer.behind_mlp is None else self._norm(made, layer.behind_mlp))
            if index in taps:
                hidden[index] = x
        x = self._norm(x, self.norm)
        if -1 in taps:
            hidden[-1] = x
        if step.wanted is not None:
            x = x[step.wanted]
        logits = self.head.over(x, step.head_pieces) if len(x) else x.new_zeros(0, self.vocab_width)
        logits = logits.float()
        if (cap := self.features.logit_cap) is not None:
            logits = soft_cap(logits, cap)
        return ForwardResult(logits, hidden)

    def _embed(self, ids: Tensor) -> Tensor:
        head = self._embeddings_of_head
        return F.embedding(ids, self.embedding) if head is None else head.rows(ids)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.features.plus_one_norms:
            return F.rms_norm(x.float(), weight.shape, weight, self.features.eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.features.eps)

    def _keys_values(
        self, index: int, x: Tensor, turn: tuple[Tensor, Tensor], step: StepInputs, cache: KVCache
    ) -> Tensor:
        """Queries, keys and values [rows, (heads + 2 kv_heads) * head_dim]; the last two go to the cache."""
        layer = self.layers[index]
        qkv = layer.qkv.over(x, step.pieces)
        width = self.heads * self.head_dim
        turned = qkv[:, : width + self.kv_heads * self.head_dim].view(len(qkv), -1, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            turned[:, : self.heads] = self._norm(turned[:, : self.heads], layer.query_norm)
            turned[:, self.heads :] = self._norm(turned[:, self.heads :], layer.key_norm)
        turned = turned[..., : turn[0].shape[-1]]  # Phi-3 may turn only the first part of a head
        swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        turned.mul_(turn[0]).addcmul_(swapped, turn[1])
        new_kv = qkv[:, width:]
        new_kv = new_kv[: step.tokens] if step.real is None else new_kv[step.real]
        cache.write(index, step.cache_slots, step.cache_positions, new_kv)
        return qkv

    def _attention(self, index: int, qkv: Tensor, step: StepInputs, cache: KVCache) -> Tensor:
        width = self.heads * self.head_dim
        queries = qkv[:, :width]
        if len(step.groups) == 1 and step.groups[0].rows is None:
            mixed = self._attend(step.groups[0], queries, index, cache)
        else:
            mixed = torch.zeros_like(queries)
            for group in step.groups:
                assert group.rows is not None and group.back is not None
                if group.placed is not None:
                    rows, slots, positions = group.placed
                    cache.write(index, slots, positions, qkv[rows, width:])
                own, places = group.back
                mixed[own] = self._attend(group, queries[group.rows], index, cache)[places]
        return self.layers[index].out.over(mixed, step.pieces)

    def _attend(self, group: AttentionGroup, queries: Tensor, index: int, cache: KVCache) -> Tensor:
        slots, share = group.slot_high - group.slot_low, self.geometry.group
        folded = queries.view(slots, group.width, self.kv_heads, share, self.head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(slots, self.kv_heads, share * group.width, self.head_dim)
        keys, values = cache.keys_values(index, group.slot_low, group.slot_high, group.kv_len)
        mask = group.ring_mask if self.features.windowed[index] else group.mask
        assert mask is not None
        mixed = self.attention(folded, keys, values, mask, group.past)
        mixed = mixed.view(slots, self.kv_heads, share, group.width, self.head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(slots * group.width, self.heads * self.head_dim)

    # -- weights -------------------------------------------------------------------------------------------

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return 1.0 + weight.float() if self.features.plus_one_norms else weight

    def _layer(self, take: _Taker, index: int, form: Form) -> _Layer:
        prefix, features = f"model.layers.{index}.", self.features
        attention = prefix + "self_attn."
        norm = lambda name: self._norm_weight(take(f"{prefix}{name}.weight"))  # noqa: E731
        parts = ("qkv_proj",) if features.fused else ("q_proj", "k_proj", "v_proj")
        own = features.query_key_norms
        return _Layer(
            input_norm=norm("input_layernorm"),
            qkv=take.joined(attention, parts, form),
            query_norm=norm("self_attn.q_norm") if own else None,
            key_norm=norm("self_attn.k_norm") if own else None,
            out=take.joined(attention, ("o_proj",), form),
            behind_attention=norm("post_attention_layernorm") if features.outer_norms else None,
            mlp_norm=norm("pre_feedforward_layernorm" if features.outer_norms else "post_attention_layernorm"),
            mlp=self._mlp(take, prefix + "mlp.", features.routing if features.sparse[index] else None, form),
            behind_mlp=norm("post_feedforward_layernorm") if features.outer_norms else None,
        )

    def _mlp(self, take: _Taker, prefix: str, routing: Routing | None, form: Form) -> _Dense | Experts:
        activation = ACTIVATIONS[self.features.activation]
        if routing is not None:
            gate_up, down = take.stored(prefix + "experts.gate_up_proj"), take.stored(prefix + "experts.down_proj")
            return Experts(routing, take.stored(prefix + "gate.weight"), gate_up, down, activation, form)
        parts = ("gate_up_proj",) if self.features.fused else ("gate_proj", "up_proj")
        return _Dense(take.joined(prefix, parts, form), take.joined(prefix, ("down_proj",), form), activation)


class _Taker:
    """Hands out tensors by name and knows what is missing and what was left over."""

    def __init__(self, tensors: StoredTensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __call__(self, name: str) -> Tensor:
        return self.stored(name).read()

    def stored(self, name: str) -> Stored:
        stored = self.optional(name)
        if stored is None:
            raise ModelFormatError(f"the model has no tensor {name}; the files are incomplete")
        return stored

    def optional(self, name: str) -> Stored | None:
        stored = self._tensors.take(name)
        if stored is None or self._device.type == "cpu":
            return stored
        rows, device = stored.rows, self._device
        return replace(stored, rows=lambda low, high: rows(low, high).to(device))

    def joined(self, prefix: str, names: Sequence[str], form: Form) -> Linear:
        """One product of the weights of all `names`, with their biases where the first has one."""
        weight = join([self.stored(f"{prefix}{name}.weight") for name in names])
        first = self.optional(f"{prefix}{names[0]}.bias")
        if first is None:
            return Linear(weight, form=form)
        bias = join([first, *(self.stored(f"{prefix}{name}.bias") for name in names[1:])])
        return Linear(weight, bias.read(), form=form)

    def finish(self) -> None:
        left = [n for n in self._tensors if not n.endswith("rotary_emb.inv_freq")]
        if left:
            raise UnsupportedModel(f"the model has tensors this decoder does not use: {', '.join(left[:4])}")
