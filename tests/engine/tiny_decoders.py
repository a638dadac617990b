"""Tiny random Llama and Qwen2 models as `LlamaDecoder`s, beside Transformers' own modules."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import torch
from tiny_models import tiny_model

import paceline.decode.model.llama as llama_module
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.step import RowPolicy

_POLICIES: dict[Any, RowPolicy] = {}


def _policy(products: Any, geometry: Any, head_dim: int, attention: Any) -> RowPolicy:
    """The row policy depends on shapes alone: found once for each."""
    key = (tuple((m.in_features, m.out_features) for m in products), geometry, head_dim, attention)
    if key not in _POLICIES:
        _POLICIES[key] = find(products, geometry, head_dim, attention)
    return _POLICIES[key]


find = llama_module.find_row_policy


def decoder_of(model: Any, dtype: torch.dtype = torch.float32) -> LlamaDecoder:
    """A decoder with the weights of a Transformers module."""
    tensors = {name: value.detach().to(dtype, copy=True) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with mock.patch.object(llama_module, "find_row_policy", _policy):
        return LlamaDecoder(model.config, tensors, torch.device("cpu"))


@cache
def tiny_decoder(
    kind: str = "llama", seed: int = 0, layers: int = 2, vocabulary: int = 384, dtype: torch.dtype = torch.float32
) -> LlamaDecoder:
    """Made once; do not write into it."""
    return decoder_of(tiny_model(kind, seed, num_hidden_layers=layers, vocab_size=vocabulary), dtype)
