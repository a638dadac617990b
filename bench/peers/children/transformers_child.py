"""Transformers' `generate` behind the protocol, timed by a streamer: when the first token came and when the last."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers
from lines import answer, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class Transformers:
    def load(
        self, model: str, weights: str, mode: str, draft: str | None, threads: int, stop_ids: list[int], **_: Any
    ) -> dict[str, Any]:
        torch.set_num_threads(threads)
        kind, _, number = mode.partition("/")
        dtype = getattr(torch, weights)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.extra: dict[str, Any] = {}
        if kind == "lookup":
            self.extra["prompt_lookup_num_tokens"] = int(number or 10)
        elif kind == "draft":
            self.extra["assistant_model"] = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype).eval()
        self.stop_ids = sorted(stop_ids)
        return {"about": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        began = time.perf_counter()
        answers = [self._one(ids, max_tokens) for ids in prompts]
        return {"answers": answers, "wall_s": time.perf_counter() - began}

    @torch.inference_mode()
    def score(self, tokens: list[int], path: str) -> dict[str, Any]:
        np.save(path, self.model(torch.tensor([tokens])).logits[0].float().numpy())
        return {}

    @torch.inference_mode()
    def _one(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0],
            **{k: v for k, v in self.extra.items() if k != "assistant_model"},
        )
        helper = {k: v for k, v in self.extra.items() if k == "assistant_model"}
        prompt = torch.tensor([ids])
        stamps = Stamps()
        began = time.perf_counter()
        made = self.model.generate(
            prompt, generation_config=config, attention_mask=torch.ones_like(prompt), streamer=stamps, **helper
        )
        times = stamps.times[1:]  # the first thing Transformers hands a streamer is the prompt
        return answer(made[0, len(ids) :].tolist(), times[0] - began, times[-1] - times[0])


class Stamps(BaseStreamer):
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


if __name__ == "__main__":
    child = Transformers()
    serve({"load": child.load, "generate": child.generate, "load_scores": child.load, "score": child.score})
