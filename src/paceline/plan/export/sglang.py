"""SGLang 0.5.23 (`srt/arg_groups/fields/spec.py`): flags, and the adaptive file with one candidate a batch
size.
"""

from __future__ import annotations

import json

from paceline.plan.export.base import Advice, Export, command, refuse, version_notes

__all__ = ["render"]

KNOWN = "0.5.23"
ALGORITHMS = {"ngram": "NGRAM", "model": "STANDALONE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH",
              "dspark": "DSPARK"}  # fmt: skip
_ADAPTIVE = ("eagle3", "mtp")


def render(advice: Advice, version: str | None) -> Export:
    """`launch.sh`, and `adaptive.json` where the length varies with the batch."""
    parts = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        advice.model,
        "--tp-size",
        str(advice.tensor),
    ]
    groups = max(1, advice.expert // advice.tensor)
    if advice.expert > 1:
        parts += ["--ep-size", str(advice.expert)]
    if groups > 1:
        parts += ["--dp-size", str(groups), "--enable-dp-attention"]
    # With speculation on the default silently becomes 48, so the plan's figure is always written.
    parts += ["--max-running-requests", str(advice.sequences)]
    notes = version_notes("SGLang", version, KNOWN)
    if not advice.on:
        return Export(
            {"launch.sh": command(parts)}, ("the plan advises no speculation: none is configured.", *notes)
        )
    if advice.kind not in ALGORITHMS:
        near = (
            " (NGRAM with --speculative-ngram-external-corpus-path is the nearest)"
            if advice.kind == "suffix"
            else ""
        )
        raise refuse("SGLang", advice.kind, f"it has {', '.join(ALGORITHMS.values())}{near}")
    parts += ["--speculative-algorithm", ALGORITHMS[advice.kind]]
    if advice.draft and advice.kind not in ("ngram", "mtp"):
        parts += ["--speculative-draft-model-path", advice.draft]
    parts += _lengths(advice)
    files: dict[str, str] = {}
    if _is_adaptive(advice, groups):
        parts += ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
        files["adaptive.json"] = _adaptive(advice)
    return Export({"launch.sh": command(parts), **files}, tuple(_warnings(advice, groups) + notes))


def _lengths(advice: Advice) -> list[str]:
    longest = advice.longest
    if advice.kind == "ngram":
        return ["--speculative-num-draft-tokens", str(longest)]
    if advice.kind == "dflash":
        return ["--speculative-dflash-block-size", str(longest)]
    if advice.kind == "dspark":
        return ["--speculative-dspark-block-size", str(longest)]
    # All three together or none: a chain of D steps scores D + 1 tokens.
    return ["--speculative-num-steps", str(longest), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(longest + 1)]  # fmt: skip


def _is_adaptive(advice: Advice, groups: int) -> bool:
    return advice.varies and advice.kind in _ADAPTIVE and groups == 1


def _adaptive(advice: Advice) -> str:
    """Keys are the smallest batch of each range: the engine takes the closest key at or below its batch."""
    table = {str(s.first): {"candidate_steps": [s.length]} for s in advice.steps}
    return json.dumps(table, indent=1) + "\n"


def _warnings(advice: Advice, groups: int) -> list[str]:
    found = []
    if advice.varies and advice.kind not in _ADAPTIVE:
        found.append(
            f"lengths by batch size work for EAGLE and EAGLE3 only; {advice.longest} is used at every load."
        )
    elif advice.varies and groups > 1:
        found.append(
            "--speculative-adaptive does not work with DP attention: the longest length is used at "
            "every load."
        )
    elif advice.varies:
        found.append(
            "one candidate a batch size makes the adaptive file a fixed schedule; the engine's own rule "
            "follows "
            "acceptance alone and never looks at cost."
        )
        if any(s.length == 0 for s in advice.steps):
            found.append(
                "0 steps still run inside the speculative server; a server without speculation is "
                "faster there."
            )
    if advice.kind in ("eagle3", "model", "dflash", "dspark") and not advice.draft:
        found.append(
            "the plan names no drafter: add --speculative-draft-model-path (write --draft KIND:MODEL)."
        )
    if advice.kind in ("eagle3", "mtp", "model"):
        found.append(
            "min_p is ignored in verification, and penalties are applied once for all drafted positions."
        )
        found.append(
            "on CPU, XPU and (without rejection sampling) ROCm verification is greedy whatever the "
            "temperature."
        )
    if advice.kind == "dspark":
        found.append(
            "give --speculative-dspark-sps-table-path a measured table; the plan's costs are not its format."
        )
    return found
