"""The Llama-shaped decoder (Llama, Qwen2): one ragged pass with as few operators as PyTorch allows.

Built from Transformers' config and parameter names and held to Transformers' logits by test. Q, K and V are one
product, gate and up another; the rotation is done in place; keys and values go to the cache in one copy; the
query heads that share a KV head are folded into the query axis, so that keys and values are read once and never
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.cache import KVCache
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.linear import Linear
from paceline.decode.model.rows import find_row_policy
from paceline.decode.model.step import AttentionGroup, Geometry, StepInputs
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["LlamaDecoder"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaDecoder:
    """Weights and the pass over them. Stateless: the cache belongs to the caller.

    config   a transformers config of model type llama or qwen2
    tensors  Hugging Face parameter names; consumed (popped) so that no weight is held twice
    """

    def __init__(
        self, config: Any, tensors: dict[str, Tensor], device: torch.device, *, pack: bool = True
    ) -> None:
        _refuse_unknown(config)
        self.config = config
        self.device = device
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers_count = config.num_hidden_layers
        self.eps = config.rms_norm_eps
        self.max_positions = config.max_position_embeddings
        take = _Taker(tensors, device)
        self.embedding = take("model.embed_tokens.weight")
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(take, f"model.layers.{i}.", pack) for i in range(self.layers_count)]
        self.norm = take("model.norm.weight")
        head = take.optional("lm_head.weight")
        self.head = Linear(self.embedding if head is None else head, pack=pack)
        take.finish()
        self.vocab_width = self.head.out_features
        self.cos, self.sin = _rotation(config, self.head_dim, self.dtype, device)
        self.geometry = Geometry(self.kv_heads, self.heads // self.kv_heads, self.dtype, device)
        first = self.layers[0]
        products = [first.qkv, first.out, first.gate_up, first.down, self.head]
        self.row_policy = find_row_policy(products, self.geometry, self.head_dim)

    @property
    def weight_bytes(self) -> int:
        layers = sum(m.nbytes for x in self.layers for m in (x.qkv, x.out, x.gate_up, x.down))
        return layers + self.head.nbytes + self.embedding.numel() * self.embedding.element_size()

    def new_cache(self, slots: int, limit: int) -> KVCache:
        return KVCache(
            self.layers_count, self.kv_heads, self.head_dim, slots, limit, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(
        self, step: StepInputs, cache: KVCache, taps: Sequence[int] = (), layers: int | None = None
    ) -> ForwardResult:
        """Run one pass, writing keys and values to the cache rows the step names.

        `taps` are layers whose output to return (-1: after the final norm); `layers`: only the first so many run.
        """
        x = F.embedding(step.token_ids, self.embedding)
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        hidden: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers[:layers]):
            x = x + self._attention(index, self._norm(x, layer.input_norm), (cos, sin), step, cache)
            gate, up = layer.gate_up.over(self._norm(x, layer.post_norm), step.pieces).chunk(2, dim=-1)
            x = x + layer.down.over(_silu(gate) * up, step.pieces)
            if index in taps:
                hidden[index] = x
        x = self._norm(x, self.norm)
        if -1 in taps:
            hidden[-1] = x
        if step.wanted is not None:
            x = x[step.wanted]
        logits = self.head.over(x, step.head_pieces) if len(x) else x.new_zeros(0, self.vocab_width)
        return ForwardResult(logits.float(), hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _attention(
        self, index: int, x: Tensor, turn: tuple[Tensor, Tensor], step: StepInputs, cache: KVCache
    ) -> Tensor:
        layer = self.layers[index]
        qkv = layer.qkv.over(x, step.pieces)
        width = self.heads * self.head_dim
        turned = qkv[:, : width + self.kv_heads * self.head_dim].view(len(qkv), -1, self.head_dim)
        swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        turned.mul_(turn[0]).addcmul_(swapped, turn[1])
        new_kv = qkv[:, width:]
        new_kv = new_kv[: step.tokens] if step.real is None else new_kv[step.real]
        cache.write(index, step.cache_slots, step.cache_positions, new_kv)
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
        return layer.out.over(mixed, step.pieces)

    def _attend(self, group: AttentionGroup, queries: Tensor, index: int, cache: KVCache) -> Tensor:
        slots, share = group.slot_high - group.slot_low, self.geometry.group
        folded = queries.view(slots, group.width, self.kv_heads, share, self.head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(slots, self.kv_heads, share * group.width, self.head_dim)
        keys, values = cache.keys_values(index, group.slot_low, group.slot_high, group.kv_len)
        mixed = _mix(folded, keys, values, group)
        mixed = mixed.view(slots, self.kv_heads, share, group.width, self.head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(slots * group.width, self.heads * self.head_dim)

    def _layer(self, take: _Taker, prefix: str, pack: bool) -> _Layer:
        attention = prefix + "self_attn."
        parts = [take(f"{attention}{n}_proj.weight") for n in "qkv"]
        biases = [take.optional(f"{attention}{n}_proj.bias") for n in "qkv"]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        mlp = prefix + "mlp."
        return _Layer(
            input_norm=take(prefix + "input_layernorm.weight"),
            qkv=Linear(torch.cat(parts), bias, pack=pack),
            out=Linear(take(attention + "o_proj.weight"), take.optional(attention + "o_proj.bias"), pack=pack),
            post_norm=take(prefix + "post_attention_layernorm.weight"),
            gate_up=Linear(
                torch.cat([take(mlp + "gate_proj.weight"), take(mlp + "up_proj.weight")]), pack=pack
            ),
            down=Linear(take(mlp + "down_proj.weight"), pack=pack),
        )


def _mix(
    queries: Tensor,  # [slots, kv_heads, share * width, head_dim]
    keys: Tensor,  # [slots, kv_heads, kv_len, head_dim]
    values: Tensor,
    group: AttentionGroup,
) -> Tensor:
    """Attention under the group's mask; of a prompt chunk, over what is before it without one, then joined.

    Two softmaxes join by their log-sums: the parts weigh exp(lse_i - lse), lse = log(sum of exp(lse_i)).
    """
    if group.past == 0:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    cut = group.past
    before, before_sum = flash(queries, keys[:, :, :cut], values[:, :, :cut])
    own, own_sum = flash(queries, keys[:, :, cut:], values[:, :, cut:], attn_mask=group.mask)
    share = torch.sigmoid(before_sum - own_sum)[..., None]
    return torch.lerp(own.float(), before.float(), share).to(queries.dtype)


_SERIAL = 32768  # elements from which PyTorch splits an elementwise operation over threads


def _silu(gate: Tensor) -> Tensor:
    """silu by whole rows on one thread.

    Split over threads, a row is cut where it falls, and what lies at the cut goes through another exponential,
    whose last bits differ: a row's bits would depend on the rows beside it.
    """
    if gate.device.type != "cpu" or gate.numel() < _SERIAL:
        return F.silu(gate)
    return torch.cat([F.silu(part) for part in gate.split(max(1, (_SERIAL - 1) // gate.shape[1]))])


class _Taker:
    """Hands out tensors by name and knows what is missing and what was left over."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __call__(self, name: str) -> Tensor:
        tensor = self.optional(name)
        if tensor is None:
            raise ModelFormatError(f"the model has no tensor {name}; the files are incomplete")
        return tensor

    def optional(self, name: str) -> Tensor | None:
        tensor = self._tensors.pop(name, None)
        return None if tensor is None else tensor.to(self._device)

    def finish(self) -> None:
        left = [n for n in self._tensors if not n.endswith("rotary_emb.inv_freq")]
        if left:
            raise UnsupportedModel(f"the model has tensors this decoder does not use: {', '.join(left[:4])}")


def _refuse_unknown(config: Any) -> None:
    if config.model_type not in ("llama", "qwen2"):
        raise UnsupportedModel(f"model type {config.model_type!r} is not a Llama or Qwen2 decoder")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act!r} is not supported; only silu is")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    one_table = kind == "longrope" and rope.get("short_factor") == rope.get("long_factor")
    if kind not in ("default", "linear", "llama3", "yarn") and not one_table:
        raise UnsupportedModel(f"rotary scaling {kind!r} depends on the length of the text, which comes later")
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModel("this model asks for sliding-window attention, which comes later")


def _rotation(
    config: Any, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and signed sin [positions, 1, head_dim], from Transformers' own rotary embedding of this config.

    rotate(x) = x * cos + swap_halves(x) * sin, with the sign of Transformers' rotate_half moved into sin.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(config.max_position_embeddings)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    sign = torch.cat([-torch.ones(head_dim // 2), torch.ones(head_dim // 2)])
    return cos[0, :, None].to(dtype).to(device), (sin[0, :, None] * sign).to(dtype).to(device)

