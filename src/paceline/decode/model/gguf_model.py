"""What a GGUF file says about its model: a Transformers config, and its tensors under Hugging Face names.

Architectures: `llama` (Llama, Mistral without windows, SmolLM2 ...) and `qwen2`. llama.cpp stores the query
and key rows of `llama` models in the order of its own rotary embedding (pairs of neighbours); they are put
back into Hugging Face's order (two halves) here. A tensor or a rotary setting this file does not know is
refused by name, never skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from paceline.decode.model.families import one_line, refuse_architecture
from paceline.decode.model.gguf_file import GGUFFile
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["gguf_config", "gguf_tensors"]

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2"}
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
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_READERS = 8  # threads at most; numpy lets go of the interpreter lock in its loops
_ROTARY_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> Any:
    """The Transformers config (`LlamaConfig`, `Qwen2Config`) of the model in `file`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    architecture = file.require("general.architecture", str)
    if architecture not in _MODEL_TYPES:
        refuse_architecture(architecture, str(file.path), allowed=sorted(_MODEL_TYPES))
    if (experts := file.get(f"{architecture}.expert_count", int)) is not None and experts > 0:
        raise UnsupportedModel(
            f"{file.path} is a mixture of {experts} experts in GGUF form, which cannot be read yet; "
            "use a dense model."
        )
    values = _shape(file, architecture)
    values["rope_parameters"] = _rotary(file, architecture, values)
    values |= _special_ids(file)
    names = file.tensors
    values["tie_word_embeddings"] = "output.weight" not in names
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in names
        values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    try:
        return AutoConfig.for_model(_MODEL_TYPES[architecture], **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ModelFormatError(f"{file.path} describes no possible model: {one_line(error)}.") from error


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
    if not head_width == value_width == rotary_width:
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
        "rms_norm_eps": _shortest(file.require(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
    }


def _rotary(file: GGUFFile, architecture: str, shape: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the config, from the base, the scaling keys and the per-frequency factors."""
    prefix = f"{architecture}.rope"
    base = _shortest(file.get(f"{prefix}.freq_base", float) or 10000.0)
    kind = file.get(f"{prefix}.scaling.type", str) or "none"
    factor = file.get(f"{prefix}.scaling.factor", float) or file.get(f"{prefix}.scale_linear", float) or 1.0
    if _ROTARY_FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModel(
                f"{file.path} combines {_ROTARY_FACTORS} with {kind} scaling; allowed: none."
            )
        return _factored_rotary(file, base, shape)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": base, "factor": factor} | _yarn(file, prefix)
    raise UnsupportedModel(f"{file.path} has rotary scaling {kind!r}; allowed: none, linear, yarn.")


def _yarn(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071). The attention factor is 0.1 ln(factor) + 1, as both libraries have it."""
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "attn_factor", "yarn_attn_factor"):
        if (value := file.get(f"{prefix}.scaling.{key}", float)) not in (None, 1.0):
            raise UnsupportedModel(f"{file.path} sets {prefix}.scaling.{key} to {value}; allowed: 1.")
    settings: dict[str, Any] = {
        "original_max_position_embeddings": file.require(f"{prefix}.scaling.original_context_length", int)
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := file.get(f"{prefix}.scaling.{key}", float)) is not None:
            settings[name] = value
    return settings


def _factored_rotary(file: GGUFFile, base: float, shape: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF stores as one divisor per frequency.

    LongRoPE with equal short and long factors and no attention factor is exactly that division.
    """
    factors = file.read(_ROTARY_FACTORS, torch.float32).tolist()
    if len(factors) != shape["head_dim"] // 2:
        raise ModelFormatError(
            f"{file.path}: {_ROTARY_FACTORS} has {len(factors)} factors; heads of {shape['head_dim']} values "
            "need one for every two."
        )
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": shape["max_position_embeddings"],
    }


def _special_ids(file: GGUFFile) -> dict[str, int | None]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in keys.items()}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-6 as 9.99999997e-07."""
    return float(str(np.float32(value)))


def gguf_tensors(
    file: GGUFFile, config: Any, dtype: torch.dtype, progress: Callable[[str], None] | None
) -> dict[str, torch.Tensor]:
    """Every weight of `file` in `dtype` under its Hugging Face name, one at a time off the disk."""
    names = {_target_name(file, name): name for name in file.tensors if name != _ROTARY_FACTORS}

    def read(name: str) -> torch.Tensor:
        return file.read(name, dtype, _row_order(name, file.tensors[name].shape[0], config))

    tensors: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _READERS)) as pool:
        for target, tensor in zip(names, pool.map(read, names.values()), strict=True):
            if progress is not None and len(tensors) % max(len(names) // 20, 1) == 0:
                progress(f"reading {file.path.name}: {len(tensors)} of {len(names)} tensors")
            tensors[target] = tensor
    return tensors


def _target_name(file: GGUFFile, name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    if (match := _LAYER.fullmatch(name)) and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    raise UnsupportedModel(
        f"{file.path} has a tensor {name} that {file.metadata['general.architecture']} models do not have; "
        "this variant cannot be read yet."
    )


def _row_order(name: str, rows: int, config: Any) -> np.ndarray | None:
    """For each Hugging Face row of a `llama` query or key projection, its row in the file; else None."""
    match = _LAYER.fullmatch(name)
    if config.model_type != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    heads = config.num_attention_heads if match[2] == "attn_q" else config.num_key_value_heads
    if rows % (2 * heads):
        raise ModelFormatError(f"tensor {name} has {rows} rows for {heads} heads; the file is damaged.")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
