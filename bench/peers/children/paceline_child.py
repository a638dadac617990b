"""Paceline behind the protocol, by its public calls: a stream for one prompt, `generate` for several at once."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import numpy as np
from lines import answer, serve

from paceline import LLM, SamplingParams
from paceline.core.output import Completion
from paceline.decode.model.step import Span, build_inputs

WIDTH = 16  # tokens of a pass that scores
DRAFTS = {"plain": ["none"], "auto": ["auto"], "auto+draft": ["auto", "model:{draft}"]}


class Paceline:
    def __init__(self) -> None:
        self.calls = count()

    def load(
        self, model: str, weights: str, mode: str, draft: str | None, threads: int, context: int, streams: int, **_: Any
    ) -> dict[str, Any]:
        self.llm = LLM(
            model,
            draft=[name.format(draft=draft) for name in DRAFTS[mode]],
            dtype=weights,
            threads=threads,
            max_batch=streams,
            max_context=context,
            prefix_cache=False,  # a prompt run again is measured again
        )
        return {"about": f"load {self.llm.load_s:.1f} s" + "".join(f"; {note}" for note in self.llm.notes)}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(max_tokens=max_tokens)
        tenant = str(next(self.calls))  # no run drafts from an earlier answer
        began = time.perf_counter()
        if len(prompts) == 1:
            answers = [self._stream(prompts[0], params, tenant)]
        else:
            outputs = self.llm.generate(prompts, params, tenant=tenant)
            answers = [answer(_tokens(o.completions[0]), 0.0, 0.0) for o in outputs]
        return {"answers": answers, "wall_s": time.perf_counter() - began}

    def _stream(self, prompt: list[int], params: SamplingParams, tenant: str) -> dict[str, Any]:
        began = time.perf_counter()
        stream = self.llm.stream(prompt, params, tenant=tenant)
        times = [time.perf_counter() for delta in stream if delta.token_ids]
        return answer(_tokens(stream.output.completions[0]), times[0] - began, times[-1] - times[0])


def _tokens(done: Completion) -> list[int]:
    if done.error is not None:
        raise RuntimeError(done.error)
    return list(done.token_ids)


class Scores:
    """Logits by passes as wide as a verify block: the bits that decoding has."""

    def load(self, model: str, weights: str, threads: int, context: int, **_: Any) -> dict[str, Any]:
        llm = LLM(model, draft="none", dtype=weights, threads=threads, max_batch=1, max_context=context)
        self.model, self.context = llm.engine.model, context
        return {}

    def score(self, tokens: list[int], path: str) -> dict[str, Any]:
        cache = self.model.new_cache(1, self.context)
        cache.reserve_capacity(self.context)
        rows = []
        for start in range(0, len(tokens), WIDTH):
            spans = [Span(0, start, tokens[start : start + WIDTH], want="all")]
            inputs = build_inputs(spans, cache.capacity, self.model.geometry, self.model.row_policy)
            first, count = inputs.logits_of[0]
            logits = self.model.forward(inputs, cache).logits
            rows.append(logits[first : first + count].float().numpy().copy())
        np.save(path, np.concatenate(rows))
        return {}


if __name__ == "__main__":
    child, scores = Paceline(), Scores()
    serve({"load": child.load, "generate": child.generate, "load_scores": scores.load, "score": scores.score})
