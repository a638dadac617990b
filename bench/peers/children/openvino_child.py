"""OpenVINO GenAI behind the protocol. Its own clocks are taken: `ttft`, and the time of every token.

Prompts are token ids. Prefix caching is off, so that a prompt run again is measured again; everything else is as the
pipeline sets it (paged attention, its own inference precision and cache type), but in mode `sdpa`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import answer, serve


class OpenVINO:
    def load(
        self, model: str, mode: str, draft: str | None, threads: int, stop_ids: list[int], streams: int, **_: Any
    ) -> dict[str, Any]:
        kind, _, number = mode.partition("/")
        self.config = genai.GenerationConfig()
        self.config.do_sample = False
        self.config.apply_chat_template = False
        self.config.stop_token_ids = set(stop_ids)
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if kind == "lookup":
            options["prompt_lookup"] = True
            self.config.num_assistant_tokens, self.config.max_ngram_size = int(number or 10), 3
        elif kind == "draft":
            options["draft_model"] = genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=threads)
            self.config.num_assistant_tokens = int(number or 5)
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        self.many = streams > 1
        if self.many:
            scheduler.max_num_seqs = streams
            self.pipe: Any = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        elif kind == "sdpa":
            self.pipe = genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **options)
        else:
            scheduler.max_num_batched_tokens = sys.maxsize  # a prompt is one pass, as the pipeline itself sets it
            self.pipe = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **options)
        return {"about": f"openvino-genai {genai.get_version()}"}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        self.config.max_new_tokens = max_tokens
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        began = time.perf_counter()
        if self.many:
            results = self.pipe.generate(inputs, [self.config] * len(inputs))
            answers = [answer(list(r.m_generation_ids[0]), 0.0, 0.0) for r in results]
        else:
            answers = [self._one(tensor) for tensor in inputs]
        return {"answers": answers, "wall_s": time.perf_counter() - began}

    def _one(self, tensor: ov.Tensor) -> dict[str, Any]:
        made = self.pipe.generate(tensor, self.config)
        metrics = made.perf_metrics
        times_ms = metrics.raw_metrics.m_new_token_times
        return answer(list(made.tokens[0]), metrics.get_ttft().mean / 1e3, (times_ms[-1] - times_ms[0]) / 1e3)


class Scores:
    """Logits of the model itself, without the pipeline: scaled-dot-product attention, the plugin's own precision."""

    def load(self, model: str, threads: int, **_: Any) -> dict[str, Any]:
        compiled = ov.Core().compile_model(f"{model}/openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.request = compiled.create_infer_request()
        return {}

    def score(self, tokens: list[int], path: str) -> dict[str, Any]:
        self.request.reset_state()
        ids = np.array([tokens], dtype=np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        np.save(path, np.asarray(self.request.infer(inputs)["logits"][0], dtype=np.float32))
        return {}


if __name__ == "__main__":
    child, scores = OpenVINO(), Scores()
    serve({"load": child.load, "generate": child.generate, "load_scores": scores.load, "score": scores.score})
