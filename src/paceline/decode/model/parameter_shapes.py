"""Which weights a model of a config has: names and shapes, those of Transformers' module of that config (held by test).

Transformers itself would say it too, by building the module, which imports all that it needs to run one.
"""

from __future__ import annotations

from typing import Any

from paceline.decode.model.features import Features, features_of

__all__ = ["parameter_shapes"]

_MAY_HAVE_BIASES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
)  # where the config's `attention_bias` counts
Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: Any) -> Shapes:
    """Name -> shape of every weight; no `lm_head.weight` where it is the embedding."""
    features, width = features_of(config), config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, width), "model.norm.weight": (width,)}
    for index in range(config.num_hidden_layers):
        layer = _norms(config, features) | _attention(config, features) | _mlp(config, features, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def _norms(config: Any, features: Features) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if features.outer_norms else []
    heads = ["self_attn.q_norm", "self_attn.k_norm"] if features.query_key_norms else []
    sizes = dict.fromkeys(names, config.hidden_size) | dict.fromkeys(heads, features.head_dim)
    return {f"{name}.weight": (size,) for name, size in sizes.items()}


def _attention(config: Any, features: Features) -> Shapes:
    queries, keys = features.heads * features.head_dim, features.kv_heads * features.head_dim
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if features.fused:
        outputs = {"qkv_proj": queries + 2 * keys}
    everywhere = config.model_type in _MAY_HAVE_BIASES and bool(config.attention_bias)
    shapes: Shapes = {}
    for name, rows in outputs.items():
        shapes |= _product(f"self_attn.{name}", rows, config.hidden_size, everywhere or config.model_type == "qwen2")
    return shapes | _product("self_attn.o_proj", config.hidden_size, queries, everywhere)


def _mlp(config: Any, features: Features, index: int) -> Shapes:
    width, inner = config.hidden_size, config.intermediate_size
    if features.sparse[index]:
        assert features.routing is not None, "a sparse layer without a routing"
        experts = features.routing.experts
        inner = getattr(config, "moe_intermediate_size", inner)
        return {
            "mlp.gate.weight": (experts, width),
            "mlp.experts.gate_up_proj": (experts, 2 * inner, width),
            "mlp.experts.down_proj": (experts, width, inner),
        }
    biased = config.model_type == "llama" and bool(config.mlp_bias)
    outputs = {"gate_up_proj": 2 * inner} if features.fused else {"gate_proj": inner, "up_proj": inner}
    shapes: Shapes = {}
    for name, rows in outputs.items():
        shapes |= _product(f"mlp.{name}", rows, width, biased)
    return shapes | _product("mlp.down_proj", width, inner, biased)


def _product(name: str, rows: int, columns: int, biased: bool) -> Shapes:
    bias: Shapes = {f"{name}.bias": (rows,)} if biased else {}
    return {f"{name}.weight": (rows, columns)} | bias
