"""Timings from files: vLLM and SGLang benchmark results, llama-batched-bench, a plain CSV.

CSV                   batch, draft_length, and round_ms or tokens_per_s; acceptance_length and context if
                      known
vllm bench serve      max_concurrency, median_itl_ms (a round: one chunk each), spec_decode_acceptance_length
SGLang bench_serving  max_concurrency, median_itl_ms, accept_length; one JSON object, or one a line
llama-batched-bench   its table, or its JSON lines: seconds of generation over tokens is a step at draft
length 0
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError, UsageError
from paceline.plan.timings import Timing

__all__ = ["read_timings"]

_COLUMNS = {
    "batch",
    "concurrency",
    "draft_length",
    "D",
    "round_ms",
    "tokens_per_s",
    "acceptance_length",
    "context",
}


def read_timings(text: str) -> list[Timing]:
    """Timings of FILE, or FILE@D where the file does not tell its draft length."""
    name, _, tail = text.rpartition("@")
    path, length = (Path(name), int(tail)) if name and tail.isdigit() else (Path(text), None)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the timings {path} cannot be read: {error}") from error
    if content.lstrip().startswith("{"):
        return [_from_json(v, path, length) for v in _objects(content, path)]
    if re.search(r"\|\s*PP\s*\|\s*TG\s*\|\s*B\s*\|", content):
        return _batched_table(content, path)
    return _from_csv(content, path)


def _objects(content: str, path: Path) -> list[Mapping[str, Any]]:
    try:
        return [json.loads(content)]
    except json.JSONDecodeError:
        try:
            return [json.loads(line) for line in content.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise ModelFormatError(f"{path} is neither JSON nor JSON lines: {error.msg}") from error


def _from_json(v: Mapping[str, Any], path: Path, length: int | None) -> Timing:
    if "t_tg" in v and "pl" in v:
        return _batched(float(v["pl"]), float(v["pp"]), float(v["tg"]), float(v["t_tg"]))
    batch = v.get("max_concurrency") or v.get("concurrency")
    itl = v.get("median_itl_ms")
    if not batch or not itl:
        raise UsageError(
            f"{path} lacks max_concurrency or median_itl_ms: run the benchmark with a fixed "
            "--max-concurrency and "
            "streaming, so that a round's time can be read from the gaps between chunks"
        )
    al = v.get("spec_decode_acceptance_length") or v.get("accept_length")
    drafted = (
        length if length is not None else v.get("num_speculative_tokens") or v.get("speculative_num_steps")
    )
    if al and not drafted:
        raise UsageError(f"{path} ran with drafts and does not say how long: write {path}@D")
    if not al and drafted and v.get("mean_itl_ms") and v.get("mean_tpot_ms"):
        al = v["mean_itl_ms"] / v["mean_tpot_ms"]
    context = None
    if v.get("total_input_tokens") and v.get("total_output_tokens") and v.get("completed"):
        context = (v["total_input_tokens"] + v["total_output_tokens"] / 2) / v["completed"]
    return Timing(float(batch), int(drafted or 0), round_s=float(itl) / 1e3,
                  acceptance_length=float(al) if al and drafted else None, context=context)  # fmt: skip


def _batched(batch: float, prompt: float, generated: float, seconds: float) -> Timing:
    return Timing(batch, 0, round_s=seconds / generated, context=prompt + generated / 2)


def _batched_table(content: str, path: Path) -> list[Timing]:
    found = []
    for line in content.splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) >= 7 and cells[0].isdigit():
            found.append(_batched(float(cells[2]), float(cells[0]), float(cells[1]), float(cells[6])))
    if not found:
        raise ModelFormatError(f"{path} has the head of llama-batched-bench and no rows")
    return found


def _from_csv(content: str, path: Path) -> list[Timing]:
    rows = list(csv.DictReader(content.splitlines()))
    if not rows:
        raise ModelFormatError(f"{path} has no rows; a CSV needs a head and rows")
    unknown = set(rows[0]) - _COLUMNS
    if unknown or not {"batch", "concurrency"} & set(rows[0]):
        raise ModelFormatError(
            f"{path} has columns {sorted(rows[0])}; known are {sorted(_COLUMNS)}, batch is needed"
        )

    def number(row: Mapping[str, str], *keys: str) -> float | None:
        for key in keys:
            if row.get(key):
                try:
                    return float(row[key])
                except ValueError:
                    raise ModelFormatError(f"{path}: {key} is {row[key]!r}, not a number") from None
        return None

    found = []
    for row in rows:
        ms = number(row, "round_ms")
        found.append(Timing(
            number(row, "batch", "concurrency") or 0.0, int(number(row, "draft_length", "D") or 0),
            round_s=None if ms is None else ms / 1e3, tokens_per_s=number(row, "tokens_per_s"),
            acceptance_length=number(row, "acceptance_length"), context=number(row, "context"),
        ))  # fmt: skip
    return found
