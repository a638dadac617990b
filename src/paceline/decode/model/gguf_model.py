"""What a GGUF file says about its model: a Transformers config, and its tensors under Hugging Face names.

Architectures: `llama` (Llama, Mistral without windows, Mixtral, SmolLM2 ...), `qwen2`, `qwen3`, `qwen3moe`, `gemma2`,
`gemma3` and `phi3`. What llama.cpp stores in another form is put back into Hugging Face's here: the query and key
rows of `llama` models, kept in the order of its own rotary embedding (pairs of neighbours instead of two halves);
Gemma's norms, kept with their 1 added; experts, kept with gate and up apart. A tensor or a rotary setting this file
does not know is refused by name, never skipped.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from paceline.decode.model.blocks import MORE_BITS, Blocks
from paceline.decode.model.experts import join_gate_and_up
from paceline.decode.model.families import one_line, refuse_architecture
from paceline.decode.model.gguf_file import GGUFFile
from paceline.decode.model.gguf_rotary import ROTARY_FACTORS, gguf_rotary, shortest
from paceline.decode.model.stored import Stored
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["gguf_config", "gguf_tensors"]

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_OUTER_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_FAMILY = {  # beside or instead of those of `_IN_LAYER`
    "qwen3": _NORMED_HEADS,
    "qwen3_moe": _NORMED_HEADS | _EXPERTS,
    "mixtral": _EXPERTS,
    "gemma2": _OUTER_NORMS,
    "gemma3_text": _OUTER_NORMS | _NORMED_HEADS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_config(file: GGUFFile) -> Any:
    """The Transformers config (`LlamaConfig`, `Gemma3TextConfig` ...) of the model in `file`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    architecture = file.require("general.architecture", str)
    if architecture not in _MODEL_TYPES:
        refuse_architecture(architecture, str(file.path), allowed=sorted(_MODEL_TYPES))
    experts = _experts(file, architecture)
    kind = "mixtral" if experts and architecture == "llama" else _MODEL_TYPES[architecture]
    values = _shape(file, architecture) | experts
    values |= gguf_rotary(file, architecture, values)
    values |= _special_ids(file)
    names = file.tensors
    values["tie_word_embeddings"] = "output.weight" not in names
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in names
        values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if kind in ("gemma2", "gemma3_text"):
        values |= _gemma(file, architecture, values)
    if kind == "phi3":
        values["sliding_window"] = file.get("phi3.attention.sliding_window", int) or None
    try:
        return AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ModelFormatError(f"{file.path} describes no possible model: {one_line(error)}.") from error


def _experts(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """Settings of a mixture of experts, nothing for a dense model. Chosen experts' weights always sum to 1 there."""
    count = file.get(f"{architecture}.expert_count", int) or 0
    if count and architecture not in ("llama", "qwen3moe"):
        raise UnsupportedModel(
            f"{file.path} is a mixture of {count} experts of the {architecture} architecture; mixtures of llama "
            "(Mixtral) and qwen3moe can be read."
        )
    if not count:
        return {}
    active = file.require(f"{architecture}.expert_used_count", int)
    if architecture == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": active}
    width = file.require(f"{architecture}.expert_feed_forward_length", int)
    own = {"num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": width}
    return own | {"norm_topk_prob": True}


def _gemma(file: GGUFFile, architecture: str, shape: dict[str, Any]) -> dict[str, Any]:
    """What Gemma adds. The largest model of each generation scales by the model's width over its heads."""
    largest = {"gemma2": 46, "gemma3": 62}[architecture]  # layers
    scale = shape["head_dim"]
    if shape["num_hidden_layers"] == largest:
        scale = shape["hidden_size"] // shape["num_attention_heads"]
    if f"{architecture}.attention.sliding_window_pattern" in file.metadata:
        raise UnsupportedModel(f"{file.path} names a sliding_window_pattern of its own, which cannot be read yet.")
    values = {
        "query_pre_attn_scalar": scale,
        "sliding_window": file.require(f"{architecture}.attention.sliding_window", int),
        "final_logit_softcapping": file.get(f"{architecture}.final_logit_softcapping", float),
    }
    if architecture == "gemma2":
        values["attn_logit_softcapping"] = file.get("gemma2.attn_logit_softcapping", float)
    return values


def _shape(file: GGUFFile, architecture: str) -> dict[str, Any]:
    def whole(key: str) -> int:
        value = file.require(f"{architecture}.{key}", int)
        if value < 1:
            raise ModelFormatError(f"{file.path}: {architecture}.{key} is {value}; allowed: a number from 1.")
        return value

    heads, width, layers = whole("attention.head_count"), whole("embedding_length"), whole("block_count")
    if layers > len(file.tensors):
        raise ModelFormatError(f"{file.path} announces {layers} layers in {len(file.tensors)} tensors.")
    kv_heads = file.get(f"{architecture}.attention.head_count_kv", int) or heads
    if heads % kv_heads:
        raise ModelFormatError(f"{file.path} has {heads} heads for {kv_heads} key heads; allowed: a divisor.")
    head_width = file.get(f"{architecture}.attention.key_length", int) or width // heads
    value_width = file.get(f"{architecture}.attention.value_length", int) or head_width
    rotary_width = file.get(f"{architecture}.rope.dimension_count", int) or head_width
    if head_width != value_width or (rotary_width != head_width and architecture != "phi3"):
        raise UnsupportedModel(
            f"{file.path} has heads of {head_width} (keys), {value_width} (values) and {rotary_width} "
            "(rotary) values; only equal widths can be read."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path} lacks the tensor token_embd.weight; it holds no language model.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": shortest(file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
    }


def _special_ids(file: GGUFFile) -> dict[str, int | None]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}


def gguf_tensors(file: GGUFFile, config: Any, dtype: torch.dtype) -> dict[str, Stored]:
    """Every weight of `file` in `dtype` under its Hugging Face name, still on the disk."""
    names = [name for name in file.tensors if name not in ROTARY_FACTORS]
    for name in {file.tensors[name].kind: name for name in names}.values():
        file.read(name, dtype, high=1)  # a kind that cannot be dequantised is refused before anything is loaded
    return join_gate_and_up({_target_name(file, n, config.model_type): _stored(file, n, config, dtype) for n in names})


def _stored(file: GGUFFile, name: str, config: Any, dtype: torch.dtype) -> Stored:
    tensor = file.tensors[name]
    order = _row_order(name, tensor.shape[0], config)
    plus_one = config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight")

    def rows(low: int, high: int) -> torch.Tensor:
        if plus_one:
            return (file.read(name, torch.float32, None, low, high) - 1.0).to(dtype)
        return file.read(name, dtype, order, low, high)

    def blocks(low: int, high: int) -> Blocks:
        return file.blocks(name, order, low, high)

    return Stored(tensor.shape, rows, blocks if file.has_blocks(name) else None, tensor.kind in MORE_BITS)


def _target_name(file: GGUFFile, name: str, kind: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    parts = _IN_LAYER | _OF_FAMILY.get(kind, {})
    if (match := _LAYER.fullmatch(name)) and match[2] in parts:
        return f"model.layers.{match[1]}.{parts[match[2]]}.{match[3]}"
    raise UnsupportedModel(
        f"{file.path} has a tensor {name} that {file.metadata['general.architecture']} models do not have; "
        "this variant cannot be read yet."
    )


def _row_order(name: str, rows: int, config: Any) -> np.ndarray | None:
    """For each Hugging Face row of a `llama` query or key projection, its row in the file; else None."""
    match = _LAYER.fullmatch(name)
    if config.model_type not in ("llama", "mixtral") or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    heads = config.num_attention_heads if match[2] == "attn_q" else config.num_key_value_heads
    if rows % (2 * heads):
        raise ModelFormatError(f"tensor {name} has {rows} rows for {heads} heads; the file is damaged.")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
