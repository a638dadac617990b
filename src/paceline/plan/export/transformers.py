"""Hugging Face Transformers 5.24 (`GenerationConfig`): keyword arguments of `generate`, one sequence at a
time.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.plan.export.base import Advice, Export, refuse, version_notes

__all__ = ["render"]

KNOWN = "5.24.0"
KINDS = ("model", "ngram", "layer-skip", "mtp", "dflash")


def render(advice: Advice, version: str | None) -> Export:
    """`generation_config.json`, and `run.py` that uses it."""
    notes = version_notes("Transformers", version, KNOWN)
    if advice.on and advice.kind not in KINDS:
        raise refuse("Transformers", advice.kind, f"it has {', '.join(KINDS)}")
    length = advice.length_at(1) if advice.on else 0
    if length == 0:
        note = "the plan advises no speculation: none is configured."
        return Export({"generation_config.json": "{}\n", "run.py": _script(advice, 0)}, (note, *notes))
    files = {
        "generation_config.json": json.dumps(_config(advice, length), indent=1) + "\n",
        "run.py": _script(advice, length),
    }
    return Export(files, tuple(_warnings(advice) + notes))


def _config(advice: Advice, length: int) -> dict[str, Any]:
    if advice.kind == "ngram":
        return {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 2}
    # `constant` and threshold 0 keep the planned length: the defaults stop early and re-tune themselves.
    config: dict[str, Any] = {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    if advice.kind == "layer-skip":
        config["assistant_early_exit"] = advice.skip_layer
    if advice.kind == "mtp":
        config["use_mtp"] = True
    if advice.kind == "dflash":
        config["speculation_type"] = "dflash"
    return config


def _script(advice: Advice, length: int) -> str:
    draft = length > 0 and advice.kind in ("model", "dflash")
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({advice.model!r})",
        f'model = AutoModelForCausalLM.from_pretrained({advice.model!r}, dtype="auto", device_map="auto")',
    ]
    if draft:
        lines.append(
            f'draft = AutoModelForCausalLM.from_pretrained({advice.draft!r}, dtype="auto", device_map="auto")'
        )
    lines += [
        "config = GenerationConfig.from_pretrained(\".\", \"generation_config.json\")",
        "inputs = tokenizer(\"Hello\", return_tensors=\"pt\").to(model.device)",
        "output = model.generate(**inputs, generation_config=config, max_new_tokens=256"
        + (", assistant_model=draft" if draft else "") + ")",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _warnings(advice: Advice) -> list[str]:
    found = ["assisted generation takes one sequence at a time; the plan's length for batch 1 is used."]
    if advice.sequences > 1:
        found.append(
            f"the plan serves {advice.sequences} sequences at once, which `generate` cannot with "
            "drafts: use a server."
        )
    if advice.kind in ("model", "dflash"):
        found.append(
            "another tokenizer than the target's needs tokenizer= and assistant_tokenizer= in generate()."
        )
        if not advice.draft:
            found.append(
                "the plan names no drafter: put one into run.py (write --draft KIND:MODEL when planning)."
            )
    if advice.kind == "mtp":
        found.append("use_mtp works for models whose MTP head Transformers loads.")
    return found
