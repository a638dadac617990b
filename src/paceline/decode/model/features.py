"""What tells one model family from another, as data: the one decoder of `llama.py` reads it and nothing else.

`features_of` turns a Transformers config into `Features`. What a config asks for and no feature stands for is
refused by name. Why one decoder of our own and not Transformers' modules with our attention plugged in: the bits of
a row must not depend on its pass, so every product, norm and activation has to be ours to pad, pack and cut; the
families differ in little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import UnsupportedModel

__all__ = ["Features", "Routing", "features_of", "head_width", "windowed_layers"]

_GEMMA = ("gemma2", "gemma3_text")
_QUERY_KEY_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Routing:
    """A mixture of experts: each token goes to the `active` most probable of `experts`.

    normalised    the probabilities of those chosen are scaled to sum to 1
    whole_weights they stay float32 until they have been applied (Mixtral); else they are cast to the model's dtype
    """

    experts: int
    active: int
    normalised: bool
    whole_weights: bool


@dataclass(frozen=True, slots=True)
class Features:
    """Everything `llama.py` must know of a model but its weights.

    activation        of the gate: silu, or gelu_pytorch_tanh
    plus_one_norms    norms multiply by 1 + weight, in float32
    outer_norms       norms behind attention and MLP too (Gemma)
    query_key_norms   queries and keys are normed head by head before they are turned
    fused             the file holds Q, K and V as one weight, gate and up as another (Phi-3)
    embedding_scale   embeddings are multiplied by this, rounded to the model's dtype
    attention_scale   of query-key products, None for the head width to the power of -1/2
    attention_cap, logit_cap   x becomes cap * tanh(x / cap)
    windowed          by layer: whether it sees only the last `window` tokens
    layer_types       by layer: the key of its rotation in the config, None where the config has one for all
    sparse            by layer: whether its MLP is `routing`'s mixture of experts
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    plus_one_norms: bool
    outer_norms: bool
    query_key_norms: bool
    fused: bool
    embedding_scale: float | None
    attention_scale: float | None
    attention_cap: float | None
    logit_cap: float | None
    window: int | None
    windowed: tuple[bool, ...]
    layer_types: tuple[str | None, ...]
    routing: Routing | None
    sparse: tuple[bool, ...]


def features_of(config: Any) -> Features:
    """The features of a config of one of the `FAMILIES`; raises UnsupportedModel for what none stands for."""
    kind, layers = config.model_type, range(config.num_hidden_layers)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not supported; allowed: {', '.join(_ACTIVATIONS)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("this model looks at later tokens too (use_bidirectional_attention): it cannot decode")
    if kind == "gemma3_text" and config.attn_logit_softcapping is not None:
        raise UnsupportedModel("attn_logit_softcapping has no effect in Gemma 3; take it out of the config")
    gemma = kind in _GEMMA
    windowed = windowed_layers(config)
    per_type = "full_attention" in config.rope_parameters or "sliding_attention" in config.rope_parameters
    routing = _routing(config)
    return Features(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_width(config),
        eps=config.rms_norm_eps,
        activation=activation,
        plus_one_norms=gemma,
        outer_norms=gemma,
        query_key_norms=kind in _QUERY_KEY_NORM,
        fused=kind == "phi3",
        embedding_scale=config.hidden_size**0.5 if gemma else None,
        attention_scale=config.query_pre_attn_scalar**-0.5 if gemma else None,
        attention_cap=getattr(config, "attn_logit_softcapping", None) if kind == "gemma2" else None,
        logit_cap=getattr(config, "final_logit_softcapping", None),
        window=config.sliding_window if any(windowed) else None,
        windowed=windowed,
        layer_types=tuple(config.layer_types[i] if per_type else None for i in layers),
        routing=routing,
        sparse=tuple(routing is not None and _is_sparse(config, i) for i in layers),
    )


def head_width(config: Any) -> int:
    """Values in one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def windowed_layers(config: Any) -> tuple[bool, ...]:
    """Whether each layer sees a sliding window; a config without `layer_types` means the same for all."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) if config.model_type != "mistral" else None
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    if "sliding_attention" in types and window is None:
        raise UnsupportedModel("this model has sliding_attention layers and no sliding_window")
    return tuple(kind == "sliding_attention" for kind in types)


def _routing(config: Any) -> Routing | None:
    if config.model_type == "mixtral":
        return Routing(config.num_local_experts, config.num_experts_per_tok, True, True)
    if config.model_type == "qwen3_moe" and config.num_experts:
        return Routing(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob, False)
    return None


def _is_sparse(config: Any, layer: int) -> bool:
    """Qwen3-MoE may mix dense layers in."""
    if config.model_type == "mixtral":
        return True
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
