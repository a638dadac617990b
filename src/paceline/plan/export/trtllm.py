"""TensorRT-LLM, main of about September 2026 (`llmapi/llm_args.py`): YAML for `trtllm-serve --config`."""

from __future__ import annotations

import json

from paceline.plan.export.base import Advice, Export, command, refuse, version_notes

__all__ = ["render"]

KNOWN = "1.3.0"
TYPES = {"ngram": "NGram", "suffix": "SA", "model": "Draft_Target", "eagle3": "Eagle3", "mtp": "MTP",
         "dflash": "DFlash", "dspark": "DSpark"}  # fmt: skip


def render(advice: Advice, version: str | None) -> Export:
    """`config.yaml` and `launch.sh`."""
    parts = ["trtllm-serve", advice.model, "--tp_size", str(advice.tensor)]
    if advice.expert > 1:
        parts += ["--ep_size", str(min(advice.expert, advice.tensor))]
    parts += ["--max_batch_size", str(advice.sequences), "--config", "config.yaml"]
    notes = version_notes("TensorRT-LLM", version, KNOWN)
    if not advice.on:
        text = "return_perf_metrics: true\n"
        note = "the plan advises no speculation: none is configured."
        return Export({"launch.sh": command(parts), "config.yaml": text}, (note, *notes))
    if advice.kind not in TYPES:
        raise refuse("TensorRT-LLM", advice.kind, f"its PyTorch backend has {', '.join(TYPES.values())}")
    files = {"launch.sh": command(parts), "config.yaml": _yaml(advice)}
    return Export(files, tuple(_warnings(advice) + notes))


def _yaml(advice: Advice) -> str:
    lines = ["speculative_config:", f"  decoding_type: {TYPES[advice.kind]}"]
    if advice.draft and advice.kind not in ("ngram", "suffix", "mtp"):
        lines.append(f"  speculative_model: {json.dumps(advice.draft)}")
    lines.append(f"  max_draft_len: {advice.longest}")
    schedule = _schedule(advice)
    if schedule:
        lines.append("  draft_len_schedule: {" + ", ".join(f"{b}: {d}" for b, d in schedule.items()) + "}")
    if advice.kind == "ngram":
        # The default pool is shared by all requests: one user's text would be drafted to another.
        lines += ["  max_matching_ngram_size: 2", "  is_public_pool: false"]
    lines.append("return_perf_metrics: true")
    return "\n".join(lines) + "\n"


def _schedule(advice: Advice) -> dict[int, int]:
    """Largest batch -> length. Past the last key the engine drafts nothing, so a last range of 0 is left
    out.
    """
    if not advice.varies:
        return {}
    return {s.last: s.length for s in advice.steps if s.length > 0}


def _warnings(advice: Advice) -> list[str]:
    found = []
    schedule = _schedule(advice)
    if schedule and next(iter(schedule.values())) != advice.longest:
        found.append(
            "the length of the smallest batch must equal max_draft_len, and the plan's does not: do not "
            "load it."
        )
    if schedule:
        top = max(schedule)
        found.append(
            f"past batch {top} the schedule drafts nothing; one-engine drafters (MTP, Eagle3) never go "
            "below 1, since 0 "
            "leaves their cache behind."
        )
        found.append("draft_len_schedule excludes max_concurrency.")
    if advice.kind in ("eagle3", "model", "dflash", "dspark") and not advice.draft:
        found.append(
            "the plan names no drafter: add speculative_model (write --draft KIND:MODEL when planning)."
        )
    if advice.kind == "ngram":
        found.append("is_public_pool is set to false; its default shares one pool among all requests.")
    found.append("requests for logprobs or logits are refused while speculation is on.")
    found.append("acceptance_rate_threshold, if set, turns speculation off for good.")
    return found
