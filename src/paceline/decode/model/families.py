"""Which kinds of models can be decoded exactly, and why the others are refused.

A family is a Transformers `model_type` whose every layer is attention over a KV cache, all of it or the last
tokens through a sliding window, so that rejected drafts are rolled back by dropping rows. Adding one needs its
name here, its features in `features.py` and its line in the parity test.
"""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.errors import UnsupportedModel

__all__ = ["FAMILIES", "check_family", "one_line", "refuse_architecture"]

FAMILIES = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3"}
)
_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Names as Transformers (`model_type`) and as GGUF (`general.architecture`) have them.
_RECURRENT = frozenset(
    {
        *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "nemotron_h", "xlstm"),
        *("granitemoehybrid", "granitehybrid", "falcon_h1", "falcon-h1", "plamo2", "plamo3", "olmo_hybrid"),
        *("rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "recurrent_gemma", "kimi_linear", "kimi-linear"),
        *("qwen3_next", "qwen3next", "qwen3_5", "qwen3_5_text", "qwen35", "minimax", "lfm2", "lfm2_moe"),
        *("qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe", "lfm2moe", "nemotron_h_moe"),
    }
)
_COMPRESSED = frozenset({"deepseek_v2", "deepseek_v3", "deepseek2", "deepseek_v32", "minicpm3", "glm_dsa"})
_WITH_IMAGES = frozenset(
    {
        *("gemma3", "gemma3n", "gemma4", "mistral3", "llama4", "mllama", "phi4_multimodal"),
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    }
)
_REASONS = (
    (_RECURRENT, "its recurrent state cannot be rolled back after a rejected draft, so it cannot be decoded exactly"),
    (_COMPRESSED, "its cache holds compressed keys (latent attention), which there is no storage for yet"),
    (_WITH_IMAGES, "it reads more than text; a checkpoint of its text model alone may be of a supported type"),
)


def one_line(error: BaseException) -> str:
    """Another library's message, short and on one line, to stand inside one of ours."""
    return f"{' '.join(str(error).split()):.160}".rstrip(". ")


def refuse_architecture(name: str, where: str, allowed: list[str]) -> NoReturn:
    """Raises `UnsupportedModel` for the architecture `name`, with the reason where it is a known one."""
    reason = next((f": {why}" for names, why in _REASONS if name in names), ", which is not supported")
    raise UnsupportedModel(f"{where} is a {name} model{reason}; allowed: {', '.join(allowed)}.")


def check_family(config: Any, where: str) -> None:
    """Raises `UnsupportedModel` unless every layer of the model is attention over a cache in a known family."""
    if config.model_type not in FAMILIES:
        refuse_architecture(config.model_type, where, sorted(FAMILIES))
    kinds = set(getattr(config, "layer_types", None) or _LAYERS)
    if others := ", ".join(sorted(kinds - _LAYERS)):
        allowed = " and ".join(sorted(_LAYERS))
        raise UnsupportedModel(f"{where} has {others} layers; only {allowed} are supported.")
    if (quantisation := getattr(config, "quantization_config", None)) is not None:
        method = (
            quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
        )
        raise UnsupportedModel(
            f"{where} is quantised with {method}; use unquantised safetensors, or a GGUF of the same model."
        )
