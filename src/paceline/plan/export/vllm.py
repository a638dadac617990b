"""vLLM 0.33.0 (`vllm/config/speculative.py`): `--speculative-config` with a table of lengths by batch
size.
"""

from __future__ import annotations

from typing import Any

from paceline.plan.export.base import Advice, Export, command, compact_json, refuse, version_notes

__all__ = ["render"]

KNOWN = "0.33.0"
METHODS = {"ngram": "ngram", "suffix": "suffix", "model": "draft_model", "eagle3": "eagle3", "mtp": "mtp",
           "dflash": "dflash", "dspark": "dspark"}  # fmt: skip
_SCHEDULED = ("ngram", "model", "eagle3", "mtp", "dflash")
LONGEST = 128


def render(advice: Advice, version: str | None) -> Export:
    """`launch.sh`, and `speculative_config.json` with what it passes."""
    parts = ["vllm", "serve", advice.model, "--tensor-parallel-size", str(advice.tensor)]
    if advice.expert > 1:
        parts += ["--enable-expert-parallel"]
    groups = max(1, advice.expert // advice.tensor)
    if groups > 1:
        parts += ["--data-parallel-size", str(groups)]
    parts += ["--max-num-seqs", str(advice.sequences)]
    if advice.kv_dtype == "fp8":
        parts += ["--kv-cache-dtype", "fp8"]
    notes = version_notes("vLLM", version, KNOWN, _TRAPS)
    if not advice.on:
        return Export(
            {"launch.sh": command(parts)}, ("the plan advises no speculation: none is configured.", *notes)
        )
    config = _config(advice)
    parts += ["--speculative-config", compact_json(config)]
    files = {"launch.sh": command(parts), "speculative_config.json": _pretty(config)}
    return Export(files, tuple(_warnings(advice, config, groups) + notes))


def _config(advice: Advice) -> dict[str, Any]:
    if advice.kind not in METHODS:
        raise refuse("vLLM", advice.kind, f"it has {', '.join(sorted(set(METHODS.values())))}")
    longest = min(advice.longest, LONGEST)
    config: dict[str, Any] = {"method": METHODS[advice.kind], "num_speculative_tokens": longest}
    if advice.draft and advice.kind not in ("ngram", "suffix"):
        config["model"] = advice.draft
    if advice.kind == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    if advice.kind in ("dflash", "dspark"):
        config["parallel_drafting"] = True
    if advice.varies and advice.kind in _SCHEDULED:
        config["num_speculative_tokens_per_batch_size"] = [[s.first, s.last, s.length] for s in advice.steps]
    return config


def _pretty(config: dict[str, Any]) -> str:
    rows = ",\n".join(f"  {compact_json(k)}: {compact_json(v)}" for k, v in config.items())
    return "{\n" + rows + "\n}\n"


def _warnings(advice: Advice, config: dict[str, Any], groups: int) -> list[str]:
    found = []
    table = config.get("num_speculative_tokens_per_batch_size")
    if table:
        found.append(
            "a table of lengths by batch size moves CUDA graphs from FULL_AND_PIECEWISE to PIECEWISE: "
            "about 14 % at "
            "batch 1 (vllm#49548). With loads at batch 1 compare against the fixed length."
        )
        if any(k == 0 for _, _, k in table):
            found.append(
                "the table has K = 0: the server still runs the drafter there (vllm#49986), and "
                "collapses were seen at "
                "the threshold (vllm#49548). Above that batch a server without --speculative-config is "
                "faster."
            )
        if groups > 1 or advice.replicas > 1:
            found.append("under data parallelism the table is ignored: only num_speculative_tokens counts.")
    elif advice.varies:
        found.append(
            f"{advice.kind} takes no table by batch size here; the longest draft, {advice.longest}, is "
            "used at every "
            "load. Above the plan's first range it is longer than best."
        )
    if advice.kind in ("eagle3", "model", "dflash", "dspark") and not advice.draft:
        found.append('the plan names no drafter: add "model" (write --draft KIND:MODEL when planning).')
    if advice.kind == "suffix":
        found.append("suffix decoding needs `pip install arctic-inference==0.1.1`.")
    if advice.kind == "mtp":
        found.append("a length above the model's n_predict must be a multiple of it.")
    if advice.kind == "dspark":
        found.append(
            '"enable_adaptive_verification": true chooses lengths from costs profiled at start (no LoRA).'
        )
    if advice.kind == "model":
        found.append(
            "past the draft's own max_model_len its drafts are dummies (vllm#58080): acceptance falls to 0."
        )
    found.append("requests with min_p or logit_bias are refused (HTTP 400) while speculation is on.")
    return found


_TRAPS = (
    (
        "0.30.0",
        "versions before 0.30 name MTP methods per model (deepseek_mtp, ...) and may lack tables by "
        "batch size.",
    ),
)
