"""The Llama family on a CPU, compiled whole: the Python side of `decoder.cpp`.

A pass is one call. Its rows have the bits they have alone, in every pass and every way of cutting a prompt, so there is
nothing to pad and the deterministic mode costs nothing.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from paceline.decode.cache import KVCache
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.features import Features, features_of
from paceline.decode.model.rope import Rotations
from paceline.decode.model.step import Geometry, RowPolicy, StepInputs
from paceline.decode.model.stored import Stored, StoredTensors, join
from paceline.decode.native.build import library
from paceline.decode.native.weights import (
    GROUP,
    Kind,
    Packed,
    ProductStruct,
    WeightMemory,
    interleave,
    interleave_bias,
    pack,
)
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["NativeDecoder", "why_not_native"]

_QUERIES = 64  # of one attention task, as in decoder.cpp
_POLICY = RowPolicy(multiple=1, tile=512, kv_block=1, chunk_rows=(512,))


def why_not_native(config: Any) -> str:
    """What of this model `decoder.cpp` cannot compute; empty where it can all."""
    features = features_of(config)
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the width of a head": features.head_dim,
    }
    odd = [f"{name} is {width}, no multiple of {GROUP}" for name, width in widths.items() if width % GROUP]
    found = {
        f"its activation is {features.activation}": features.activation != "silu",
        "its norms multiply by 1 + weight": features.plus_one_norms,
        "it has norms behind attention and MLP": features.outer_norms,
        "it scales its embeddings": features.embedding_scale is not None,
        "it caps its scores or logits": features.attention_cap is not None or features.logit_cap is not None,
        "it looks back through a window": any(features.windowed),
        "it is a mixture of experts": any(features.sparse),
        "its layers turn differently": len(set(features.layer_types)) > 1,
        f"a head has {features.head_dim} values, more than 256": features.head_dim > 256,
        "too many query heads share a key head": features.heads // features.kv_heads > _QUERIES,
    }
    return ", ".join([*(text for text, true in found.items() if true), *odd])


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", ProductStruct),
        ("out", ProductStruct),
        ("gate_up", ProductStruct),
        ("down", ProductStruct),
    )


class _ShapeStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("vocab", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class _PassStruct(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("rows", "layers", "tasks", "wanted_rows", "keys_only", "tap_count")),
        *(
            (n, ctypes.c_void_p)
            for n in ("ids", "turns", "slots", "places", "task_row", "seen", "tail_from", "tails", "wanted")
        ),
        *((n, ctypes.c_void_p) for n in ("taps", "tap_out", "cosines", "sines", "caches")),
        ("capacity", ctypes.c_int64),
        ("cache_slots", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
    )


class NativeDecoder:
    """A `TargetModel` whose pass is `decoder.cpp`'s. Stateless but for tables of rotations and scratch memory.

    config    a transformers config for which `why_not_native` has nothing to say
    tensors   Hugging Face parameter names; consumed, so that no weight is held twice
    kind      how products are held; INT4 takes over the 4-bit blocks of a file, and is INT8 where it has more bits
    threads   of a pass
    drafts    what it says is checked by another model: INT4 is then all of it, the head too, whatever the file has
    """

    def __init__(
        self,
        config: Any,
        tensors: MutableMapping[str, Tensor],
        kind: Kind,
        *,
        threads: int,
        drafts: bool = False,
    ) -> None:
        if why := why_not_native(config):
            raise UnsupportedModel(f"the compiled decoder cannot run this model: {why}")
        self.config, self.features, self.kind = config, features_of(config), kind
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        self.layers_count = config.num_hidden_layers
        self.max_positions, self.vocab_width = config.max_position_embeddings, config.vocab_size
        self._library = library()
        self._kept: list[Tensor] = []
        stored = StoredTensors.of(tensors)
        self._load(_Loader(self._library, stored, kind, drafts), "lm_head.weight" not in stored, threads)
        features = self.features
        self.rotations = Rotations(config, features.layer_types, torch.float32, self.device)
        self._tables: tuple[Tensor, Tensor] | None = None
        share = features.heads // features.kv_heads
        self.geometry = Geometry(
            features.kv_heads, share, self.dtype, self.device, None, self.rotations.long_from, _QUERIES // share
        )
        self.row_policy = _POLICY
        self._caches: tuple[weakref.ref[KVCache], int, Any] | None = None

    def _load(self, loader: _Loader, tied: bool, threads: int) -> None:
        features = self.features
        head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        embedding = None if tied else loader.take("model.embed_tokens.weight").read().to(torch.bfloat16).contiguous()
        norm = loader.norm("model.norm.weight")
        layers = (_LayerStruct * self.layers_count)()
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            made = list(pool.map(lambda i: loader.layer(i, features), range(self.layers_count)))
            head = loader.head(head_name)
        for index, (norms, products) in enumerate(made):
            layers[index] = _LayerStruct(
                *(None if n is None else n.data_ptr() for n in norms), *(p.struct for p in products)
            )
        loader.finish()
        packed = [head, *(p for _, products in made for p in products)]
        norm_tensors = [n for norms, _ in made for n in norms if n is not None]
        self._kept = [norm, *norm_tensors, *(t for p in packed for t in p.held)]
        self._head = head
        self.weight_bytes = sum(t.numel() * t.element_size() for t in self._kept)
        if embedding is not None:
            self._kept.append(embedding)
            self.weight_bytes += embedding.numel() * 2
        scale = features.attention_scale or features.head_dim**-0.5
        rotary = _rotary_width(self.config, features)
        shape = _ShapeStruct(
            self.layers_count,
            self.config.hidden_size,
            features.heads,
            features.kv_heads,
            features.head_dim,
            self.config.intermediate_size,
            self.vocab_width,
            rotary,
            features.eps,
            scale,
        )
        self._handle = ctypes.c_void_p(
            self._library.paceline_new(
                ctypes.byref(shape),
                layers,
                ctypes.c_void_p(norm.data_ptr()),
                ctypes.byref(head.struct),
                None if embedding is None else ctypes.c_void_p(embedding.data_ptr()),
                threads,
            )
        )

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            self._library.paceline_free(handle)

    def new_cache(self, slots: int, limit: int) -> KVCache:
        features = self.features
        self.rotations.reserve(limit)
        self._tables = None
        return KVCache(self.layers_count, features.kv_heads, features.head_dim, slots, limit, self.dtype, self.device)

    def forward(
        self, step: StepInputs, cache: KVCache, taps: Sequence[int] = (), layers: int | None = None
    ) -> ForwardResult:
        """As in `TargetModel`; hidden states are float32."""
        lists = step.lists
        assert lists is not None, "this decoder takes its passes as row lists"
        run = self.layers_count if layers is None else layers
        wanted = array("i", lists.wanted)
        logits = torch.empty(len(wanted), self.vocab_width)
        hidden = {tap: torch.empty(step.tokens, self.config.hidden_size) for tap in taps}
        tap_layers = array("i", [self.layers_count if tap < 0 else tap for tap in taps])
        tap_out = array("Q", [hidden[tap].data_ptr() for tap in taps])
        ids = step.token_ids
        assert ids.is_contiguous() and ids.dtype == torch.int64
        cosines, sines = self._rotation_tables()
        call = _PassStruct(
            step.tokens,
            run,
            len(lists.tasks) - 1,
            len(wanted),
            not len(wanted) and not taps,
            len(taps),
            ids.data_ptr(),
            *(
                values.buffer_info()[0]
                for values in (
                    lists.turns,
                    lists.slots,
                    lists.places,
                    lists.tasks,
                    lists.seen,
                    lists.tail_from,
                    lists.tails,
                    wanted,
                    tap_layers,
                    tap_out,
                )
            ),
            cosines.data_ptr(),
            sines.data_ptr(),
            ctypes.addressof(self._cache_pointers(cache)),
            cache.capacity,
            cache.slots,
            logits.data_ptr(),
        )
        self._library.paceline_pass(self._handle, ctypes.byref(call))
        return ForwardResult(logits, hidden)

    def _cache_pointers(self, cache: KVCache) -> Any:
        """Addresses of a cache's layers, kept while it lives and does not grow."""
        known = self._caches
        if known is None or known[0]() is not cache or known[1] != cache.capacity:
            pointers = (ctypes.c_void_p * cache.layers)(*(layer.data.data_ptr() for layer in cache.storage))
            self._caches = known = (weakref.ref(cache), cache.capacity, pointers)
        return known[2]

    def _rotation_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, rotary / 2] by row of the rotation tables."""
        if self._tables is None:
            cosine, sine = self.rotations.table(self.features.layer_types[0])
            half = cosine.shape[-1] // 2
            self._tables = cosine[:, 0, :half].contiguous(), sine[:, 0, half:].contiguous()
        return self._tables


def _rotary_width(config: Any, features: Features) -> int:
    parameters = config.rope_parameters
    kind = features.layer_types[0]
    own = parameters if kind is None else parameters[kind]
    return int(features.head_dim * own.get("partial_rotary_factor", 1.0))


class _Loader:
    """Takes tensors by name, packs them, and knows what is missing and what was left over."""

    def __init__(self, library: ctypes.CDLL, tensors: StoredTensors, kind: Kind, drafts: bool) -> None:
        self._library, self._tensors, self._kind, self._drafts = library, tensors, kind, drafts
        self._memory = WeightMemory()

    def take(self, name: str) -> Stored:
        stored = self._tensors.take(name)
        if stored is None:
            raise ModelFormatError(f"the model has no tensor {name}; the files are incomplete")
        return stored

    def norm(self, name: str) -> Tensor:
        return self.take(name).read().float().contiguous()

    def finish(self) -> None:
        left = [n for n in self._tensors if not n.endswith("rotary_emb.inv_freq")]
        if left:
            raise UnsupportedModel(f"the model has tensors this decoder does not use: {', '.join(left[:4])}")

    def layer(self, index: int, features: Features) -> tuple[tuple[Tensor | None, ...], tuple[Packed, ...]]:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        own = features.query_key_norms
        norms = (
            self.norm(prefix + "input_layernorm.weight"),
            self.norm(prefix + "post_attention_layernorm.weight"),
            self.norm(attention + "q_norm.weight") if own else None,
            self.norm(attention + "k_norm.weight") if own else None,
        )
        qkv = ("qkv_proj",) if features.fused else ("q_proj", "k_proj", "v_proj")
        products = (
            self._product(attention, qkv),
            self._product(attention, ("o_proj",)),
            self._gated(mlp, features.fused),
            self._product(mlp, ("down_proj",)),
        )
        return norms, products

    def head(self, name: str) -> Packed:
        """INT8 at least, but of a draft model: what comes out of it is not summed up any further."""
        return self._packed(self.take(name), None, more=True)

    def _product(self, prefix: str, names: Sequence[str]) -> Packed:
        weight = join([self.take(f"{prefix}{name}.weight") for name in names])
        return self._packed(weight, self._bias(prefix, names))

    def _gated(self, prefix: str, fused: bool) -> Packed:
        if fused:  # Phi-3's file has gate and up as one
            both = self.take(prefix + "gate_up_proj.weight")
            inner = both.shape[0] // 2
            return self._packed(interleave(both.part(0, inner), both.part(inner, 2 * inner)), None)
        names = ("gate_proj", "up_proj")
        gate, up = (self.take(f"{prefix}{name}.weight") for name in names)
        bias = self._bias(prefix, names)
        return self._packed(interleave(gate, up), None if bias is None else interleave_bias(*bias.chunk(2)))

    def _packed(self, weight: Stored, bias: Tensor | None, more: bool = False) -> Packed:
        """Of a file that has more than 4 bits, more are kept, but of a draft model."""
        more = self._kind is Kind.INT4 and (more or weight.more_bits) and not self._drafts
        return pack(self._library, weight, Kind.INT8 if more else self._kind, bias, self._memory)

    def _bias(self, prefix: str, names: Sequence[str]) -> Tensor | None:
        found = [self._tensors.take(f"{prefix}{name}.bias") for name in names]
        parts = [bias.read() for bias in found if bias is not None]
        if parts and len(parts) < len(found):
            raise UnsupportedModel(f"only some of {prefix}{', '.join(names)} have a bias")
        return torch.cat(parts) if parts else None
