"""Transformers' own `generate` over the weights of a checkpoint: the speed and the texts others compare with.

The module is `AutoModelForCausalLM` of the checkpoint's config with its default attention; greedy, with its
cache, ended by the checkpoint's end-of-text ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from paceline.decode.model.checkpoint import Checkpoint

__all__ = ["Reference", "ReferenceOutput", "TopLogits"]


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The highest logits before one output token, best first."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]

    def gap_to(self, token: int) -> float | None:
        """How far `token` lies below the highest logit; None where it is not among those kept."""
        if token not in self.ids:
            return None
        return self.logits[0] - self.logits[self.ids.index(token)]


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """token_ids, the seconds after the call at which each came, and, where asked for, `top` by token."""

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    top: tuple[TopLogits, ...] = ()


class Reference:
    """A checkpoint in its Transformers module, which shares the checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.module: Any = _module(checkpoint)
        self._ends = sorted(checkpoint.eos_token_ids)

    @property
    def attention(self) -> str:
        """The attention implementation Transformers chose."""
        return str(self.module.config._attn_implementation)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        top: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ReferenceOutput:
        """Continue `prompt` greedily; with `top`, keep so many of the highest logits before every token."""
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=self._ends or None,
            pad_token_id=self._ends[0] if self._ends else 0,
            output_logits=top > 0,
            return_dict_in_generate=top > 0,
        )
        ids = torch.tensor([list(prompt)], device=self.module.device)
        stamps = _Stamps(clock)
        began = clock()
        with torch.inference_mode():
            made = self.module.generate(
                ids, generation_config=config, attention_mask=torch.ones_like(ids), streamer=stamps
            )
        sequence = made.sequences if top else made
        return ReferenceOutput(
            tuple(sequence[0, len(prompt) :].tolist()),
            tuple(t - began for t in stamps.times),
            tuple(_top(row[0], top) for row in made.logits) if top else (),
        )


class _Stamps(BaseStreamer):
    """When each token came. The first thing Transformers hands a streamer is the prompt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._clock, self._prompt_seen = clock, False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(self._clock())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def _module(checkpoint: Checkpoint) -> Any:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(checkpoint.config)
    module.load_state_dict(checkpoint.tensors, strict=False, assign=True)
    module.tie_weights()
    with torch.device("cpu"):
        module.model.rotary_emb = type(module.model.rotary_emb)(checkpoint.config)
    if (scale := getattr(module.model.embed_tokens, "scalar_embed_scale", None)) is not None:
        module.model.embed_tokens.embed_scale = torch.tensor(scale)  # Gemma's, a buffer that no file holds
    left = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    assert not left, f"the Transformers module was left without weights in {left[:4]}"
    return module.eval()


def _top(logits: Tensor, count: int) -> TopLogits:
    values, ids = logits.float().topk(count)
    return TopLogits(tuple(ids.tolist()), tuple(values.tolist()))
