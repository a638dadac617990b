"""The rotary settings of a GGUF file as `rope_parameters` of a config; unknown ones are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.decode.model.gguf_file import GGUFFile
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["ROTARY_FACTORS", "gguf_rotary", "shortest"]

_FACTORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROTARY_FACTORS = frozenset({_FACTORS, _SHORT, _LONG})  # tensors that are settings, not weights
_GEMMA_LOCAL_BASE = 10000.0


def gguf_rotary(file: GGUFFile, architecture: str, shape: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (and what belongs to them) for a config of the sizes in `shape`."""
    if architecture == "gemma3":
        local = file.get("gemma3.rope.freq_base_swa", float) or _GEMMA_LOCAL_BASE
        local_rotary = {"rope_type": "default", "rope_theta": shortest(local)}
        whole = _one(file, architecture, shape)
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": local_rotary}}
    if architecture == "phi3":
        return _phi3(file, shape)
    return {"rope_parameters": _one(file, architecture, shape)}


def _one(file: GGUFFile, architecture: str, shape: dict[str, Any]) -> dict[str, Any]:
    """From the base, the scaling keys and the per-frequency factors."""
    prefix = f"{architecture}.rope"
    base = shortest(file.get(f"{prefix}.freq_base", float) or 10000.0)
    kind = file.get(f"{prefix}.scaling.type", str) or "none"
    factor = file.get(f"{prefix}.scaling.factor", float) or file.get(f"{prefix}.scale_linear", float) or 1.0
    if _FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModel(
                f"{file.path} combines {_FACTORS} with {kind} scaling; allowed: none."
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


def _phi3(file: GGUFFile, shape: dict[str, Any]) -> dict[str, Any]:
    """The first part of each head may be turned alone, by two sets of frequencies (LongRoPE, arXiv 2402.13753)."""
    width = file.get("phi3.rope.dimension_count", int) or shape["head_dim"]
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": shortest(file.get("phi3.rope.freq_base", float) or 10000.0),
        "partial_rotary_factor": width / shape["head_dim"],
    }
    if not {_SHORT, _LONG} & file.tensors.keys():
        return {"rope_parameters": parameters}
    original = file.require("phi3.rope.scaling.original_context_length", int)
    for key, name in (("short_factor", _SHORT), ("long_factor", _LONG)):
        if name not in file.tensors:
            raise ModelFormatError(f"{file.path} lacks the tensor {name}; convert the model again.")
        parameters[key] = file.read(name, torch.float32).tolist()
    parameters |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    if (factor := file.get("phi3.rope.scaling.attn_factor", float)) is not None:
        parameters["attention_factor"] = factor
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def _factored_rotary(file: GGUFFile, base: float, shape: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, which GGUF stores as one divisor per frequency.

    LongRoPE with equal short and long factors and no attention factor is exactly that division.
    """
    factors = file.read(_FACTORS, torch.float32).tolist()
    if len(factors) != shape["head_dim"] // 2:
        raise ModelFormatError(
            f"{file.path}: {_FACTORS} has {len(factors)} factors; heads of {shape['head_dim']} values "
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


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-6 as 9.99999997e-07."""
    return float(str(np.float32(value)))
