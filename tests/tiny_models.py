"""Tiny random models and tokenizers for tests, in both file formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times in 2025!",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))\n",
    "Grüße aus München: naïve café, 東京の天気, Привет мир 🙂🚀",
    "they're, we'll, I'd; don't   stop\t\tnow",
]
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 384
# What else a tiny model of a family needs in its config. Gemma's random heads are not tied to its embeddings, which it
# scales up: such a model would say its last token for ever.
FAMILY_VALUES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "gemma2": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "phi3": {"pad_token_id": 0},
}


def tiny_backend(adds_bos: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `CORPUS`, cut like SmolLM's."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,
        special_tokens=[AddedToken(m, special=True, normalized=False) for m in MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single="<|im_start|> $A <|endoftext|>", special_tokens=[("<|im_start|>", 1), ("<|endoftext|>", 0)]
        )
    return backend


def tiny_model(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of two layers, of the Transformers model type `kind`; `changes` go into its config."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,
    }
    values |= FAMILY_VALUES.get(kind, {}) | changes
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    one = 0.0 if kind in ("gemma2", "gemma3_text") else 1.0  # their norms add 1 themselves
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + one * float("norm" in name))
    return model.eval()


def save_folder(folder: Path, model: Any, backend: Tokenizer | None, shard_bytes: int | None = None) -> Path:
    """`model` as Transformers saves it, in parts of at most `shard_bytes`."""
    size = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **size)
    if backend is not None:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            chat_template=CHAT_TEMPLATE,
        )
        tokenizer.save_pretrained(folder)
    return folder


def rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, row by row: 0, d/2, 1, d/2 + 1 ... in each head."""
    width = weight.shape[0] // heads
    order = []
    for head in range(heads):
        for i in range(width // 2):
            order += [head * width + i, head * width + width // 2 + i]
    return weight[order]


# Model type -> the architecture a GGUF of it names.
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "mistral": "llama", "gemma3_text": "gemma3"}


def architecture_of(config: Any) -> str:
    return ARCHITECTURES.get(config.model_type, config.model_type)


def stored_tensors(model: Any) -> dict[str, np.ndarray]:
    """The float32 tensors of `model` under the gguf package's names and in the form llama.cpp's converter gives."""
    config = model.config
    architecture = architecture_of(config)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), np.split(value, 2, axis=1), strict=True):
                stored[f"{names.get_name(name.replace('gate_up_proj', part))}.weight"] = half
            continue
        stem, _, kind = (name if name.endswith((".weight", ".bias")) else f"{name}.weight").rpartition(".")
        if architecture == "llama" and stem.endswith(("self_attn.q_proj", "self_attn.k_proj")):
            queries = stem.endswith("q_proj")
            value = rotary_rows(value, config.num_attention_heads if queries else config.num_key_value_heads)
        if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
            value = value + 1.0
        stored[f"{names.get_name(stem)}.{kind}"] = value
    return stored


def write_gguf(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    backend: Tokenizer | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """`model` as a GGUF with its matrices stored as `kind`; vectors stay float32, as llama.cpp has it."""
    writer = gguf.GGUFWriter(path, architecture_of(model.config))
    values = model_metadata(model.config)
    values |= byte_level_metadata(backend) if backend is not None else {}
    for key, value in (values | dict(metadata or {})).items():
        add_value(writer, key, value)
    for name, value in (stored_tensors(model) | dict(extra or {})).items():
        if name not in without:
            stored = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else kind
            writer.add_tensor(name, gguf.quants.quantize(value, stored), raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def model_metadata(config: Any) -> dict[str, Any]:
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]),
    }
    return {f"{architecture_of(config)}.{key}": value for key, value in values.items()}


def byte_level_metadata(backend: Tokenizer, padded_to: int = VOCABULARY) -> dict[str, Any]:
    """The GGUF metadata of `tiny_backend`, its end padded with unused tokens."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in MARKERS else 1 for token in tokens]
    padding = range(len(tokens), padded_to)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in padding],
        "tokenizer.ggml.token_type": types + [5 for _ in padding],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
