"""OpenVINO GenAI 2026.4: pipeline arguments and `GenerationConfig`."""

from __future__ import annotations

import json
from typing import Any

from paceline.plan.export.base import Advice, Export, refuse, version_notes

__all__ = ["render"]

KNOWN = "2026.4.1"
KINDS = ("model", "ngram", "eagle3", "mtp", "dflash")


def render(advice: Advice, version: str | None) -> Export:
    """`generation_config.json`, and `run.py` that builds the pipeline."""
    notes = version_notes("OpenVINO GenAI", version, KNOWN)
    if advice.on and advice.kind not in KINDS:
        raise refuse("OpenVINO GenAI", advice.kind, f"it has {', '.join(KINDS)}")
    length = advice.length_at(advice.sequences) if advice.on else 0
    if length == 0:
        note = "the plan advises no speculation at this load: none is configured."
        return Export({"generation_config.json": "{}\n", "run.py": _script(advice, {})}, (note, *notes))
    config: dict[str, Any] = {"num_assistant_tokens": length}
    if advice.kind == "ngram":
        config["max_ngram_size"] = 3
    files = {"generation_config.json": json.dumps(config, indent=1) + "\n", "run.py": _script(advice, config)}
    return Export(files, tuple(_warnings(advice, length) + notes))


def _script(advice: Advice, config: dict[str, Any]) -> str:
    extra = ""
    if config and advice.kind == "ngram":
        extra = ", prompt_lookup=True"
    elif config and advice.kind != "mtp":
        extra = f', draft_model=genai.draft_model({advice.draft or "DRAFT"!r}, "CPU")'
    lines = [
        "import openvino_genai as genai", "",
        "scheduler = genai.SchedulerConfig()  # one cache for target and draft",
        "scheduler.cache_size = 8  # GB",
        f"pipe = genai.LLMPipeline({advice.model!r}, \"CPU\", scheduler_config=scheduler{extra})",
        "config = genai.GenerationConfig()",
        *[f"config.{k} = {v!r}" for k, v in config.items()],
        "config.max_new_tokens = 256",
        "print(pipe.generate(\"Hello\", config))",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _warnings(advice: Advice, length: int) -> list[str]:
    found = [
        "assistant_confidence_threshold must stay unset: it excludes num_assistant_tokens.",
        "by our reading of its sampler (2026.4), sampling with draft probabilities is not the lossless "
        "rule; greedy "
        "decoding is unaffected. Check before relying on sampled text.",
    ]
    if advice.varies:
        found.append(f"there is no length by batch size: D = {length} at every load.")
    if advice.kind == "dflash":
        found.append("DFlash runs without prefix caching.")
    if advice.kind == "mtp":
        found.append("MTP works for Gemma-4, in the stateful pipeline: greedy, one sequence.")
    if advice.kind in ("model", "eagle3", "dflash") and not advice.draft:
        found.append(
            "the plan names no drafter: replace DRAFT in run.py (write --draft KIND:MODEL when planning)."
        )
    found.append("models must be converted to OpenVINO's format first (optimum-cli export openvino).")
    return found
