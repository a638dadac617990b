"""llama.cpp, commit 0c1e570 of 1 October 2026 (`common/arg.cpp`): flags of `llama-server`."""

from __future__ import annotations

from paceline.plan.export.base import Advice, Export, command, refuse, version_notes

__all__ = ["render"]

KNOWN = "0.3.36"  # llama-cpp-python's vendored commit
TYPES = {"model": "draft-simple", "eagle3": "draft-eagle3", "mtp": "draft-mtp", "dflash": "draft-dflash",
         "dspark": "draft-dspark", "ngram": "ngram-simple"}  # fmt: skip
# With 0 long drafts accept almost nothing (llama.cpp#25908); .6 with n-max 2 beat 0 with 3 (#24508).
P_MIN = "0.6"


def render(advice: Advice, version: str | None) -> Export:
    """`launch.sh`."""
    slots = advice.sequences
    parts = ["llama-server", "-m", advice.model, "-np", str(slots), "--metrics"]
    notes = version_notes("llama.cpp", version, KNOWN)
    if not advice.on:
        return Export(
            {"launch.sh": command(parts)}, ("the plan advises no speculation: none is configured.", *notes)
        )
    if advice.kind not in TYPES:
        near = "; ngram-mod (a hash pool) is the nearest" if advice.kind == "suffix" else ""
        raise refuse("llama.cpp", advice.kind, f"it has {', '.join(TYPES.values())}{near}")
    length = advice.length_at(slots)
    if length == 0:
        note = f"at {slots} slots the plan drafts nothing: none is configured."
        return Export({"launch.sh": command(parts)}, (note, *notes))
    parts += ["--spec-type", TYPES[advice.kind]]
    if advice.kind == "ngram":
        parts += ["--spec-ngram-simple-size-n", "12", "--spec-ngram-simple-size-m", str(length)]
    else:
        if advice.draft and advice.kind != "mtp":
            parts += ["--spec-draft-model", advice.draft]
        parts += ["--spec-draft-n-max", str(length), "--spec-draft-n-min", "0", "--spec-draft-p-min", P_MIN]
    return Export({"launch.sh": command(parts)}, tuple(_warnings(advice, slots, length) + notes))


def _warnings(advice: Advice, slots: int, length: int) -> list[str]:
    found = []
    if advice.varies:
        found.append(
            f"llama.cpp has no length by batch size: D = {length}, the plan's for {slots} slots, at "
            "every load."
        )
    if advice.kind in ("model", "eagle3", "dflash", "dspark") and not advice.draft:
        found.append(
            "the plan names no drafter: add --spec-draft-model FILE.gguf (write --draft KIND:MODEL)."
        )
    found.append(
        "-m and --spec-draft-model take GGUF files; a name from the plan must be replaced by its file."
    )
    found.append(
        "a failed speculation set-up falls back to plain decoding with only a log line: look for it."
    )
    found.append(
        "--draft-max, --draft-min and --draft were removed and raise an error; older builds know only those."
    )
    found.append("logprobs of drafted tokens come back as 0.0 (llama.cpp#27972).")
    return found
