"""The sign of the gain in published single numbers whose two arms are stated (set P).

Acceptance is as published, or an assumed range, stated in the table below; a row counts as right when the
whole range lies on the measured side of 1, as undecided when the range spans 1. Hardware that a source
leaves out is assumed and named. Gains within 3 % of 1 are ties: there either side is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.plan.config import find_model
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.mechanisms import Mechanism
from paceline.plan.memory import max_batches
from paceline.plan.scenario import Load, Scenario
from paceline.plan.timings import Ledger
from paceline.plan.validate.figures import Figure, read_rows

__all__ = ["SIGN_ROWS", "SignRow", "predict_gain", "validate_signs"]

NAME = "published-spec-numbers/published_spec_points.csv"
TIE = 0.03


@dataclass(frozen=True, slots=True)
class SignRow:
    """One published pair: `plain` and `spec` name rows of the table (or `truth` is the published speedup)."""

    label: str
    model: str
    hardware: str
    devices: int
    dtype: str
    kind: str
    draft: str | None
    batch: int
    length: int
    prompt: float
    output: float
    lengths: tuple[float, float]  # range of AL
    spec: str
    plain: str | None
    truth: float | None = None
    assumed: str = ""


def _gemma(context: int) -> SignRow:
    return SignRow(
        f"Gemma-4-31B, context {context}",
        "gemma-4-31b",
        "h100-nvl",
        1,
        "fp8",
        "model",
        "qwen3-0.6b",
        256,
        3,
        context,
        100,
        (1.7, 2.1),
        f"gemma-ctx{context}-K3",
        f"gemma-ctx{context}-K0",
        assumed="AL 1.7-2.1 (a generic prompt set); a 0.6 B drafter",
    )


def _llama(kind: str, length: int, lengths: tuple[float, float]) -> SignRow:
    return SignRow(
        f"Llama-3.1-8B {kind}, D = {length}",
        "llama-3.1-8b",
        "h100",
        1,
        "bf16",
        "eagle3",
        None,
        1,
        length,
        100,
        300,
        lengths,
        f"llama8b-h100-{kind}K{length}",
        "llama8b-h100-AR",
        assumed="AL of the same drafter kind on MT-Bench",
    )


def _glm(length: int, al: float, value: float) -> SignRow:
    return SignRow(
        f"GLM-4.7, D = {length}", "glm-4.7", "h200", 8, "fp8", "mtp", None, 2, length, 1024, 512, (al, al),
        "glm47-sglang-static", None, value / 447.2, "8 x H200",
    )  # fmt: skip


def _gaudi(batch: int, truth: float) -> SignRow:
    return SignRow(
        f"DeepSeek-R1 on Gaudi, batch {batch}",
        "deepseek-r1",
        "gaudi3",
        8,
        "fp8",
        "mtp",
        None,
        batch,
        1,
        1024,
        1024,
        (1.88, 1.88),
        "deepseek-r1-gaudi",
        None,
        truth,
        "8 x Gaudi 3",
    )


SIGN_ROWS: tuple[SignRow, ...] = (
    *(_gemma(c) for c in (400, 900, 1900, 4000)),
    _llama("E1", 2, (1.9, 2.3)),
    _llama("E1", 4, (2.1, 2.6)),
    _llama("E1", 7, (2.2, 2.7)),
    _llama("E3", 2, (2.1, 2.5)),
    _glm(1, 1.85, 594.7),
    _glm(3, 3.04, 767.8),
    _glm(7, 4.52, 732.3),
    _gaudi(4, 1.6),
    _gaudi(32, 1.5),
    _gaudi(128, 1.35),
    _gaudi(256, 1.0),
)


def predict_gain(row: SignRow, al: float) -> float:
    """Throughput with the drafts over throughput without, each at the batch its memory allows."""
    shape = find_model(row.model)
    scenario = Scenario(
        shape, find_hardware(row.hardware), Load(row.prompt, row.output), Precision.of(shape, row.dtype),
        Layout(row.devices, row.devices if shape.is_moe else 1), row.devices,
    )  # fmt: skip
    draft = Mechanism(row.kind, model=find_model(row.draft) if row.draft else None)
    rates = []
    for mechanism, length, tokens in ((Mechanism("none"), 0, 1.0), (draft, row.length, al)):
        fits = max_batches(scenario, mechanism, [length], scenario.load.mean_context)[0]
        batch = float(min(row.batch, max(fits, 1)))
        ledger = Ledger.of(scenario, mechanism, [batch], [length], [scenario.load.mean_context])
        rates.append(float(ledger.tokens_per_s(scenario.priced_by, np.array([tokens]))[0]))
    return rates[1] / rates[0]


def _truth(row: SignRow, values: dict[str, str]) -> float:
    if row.truth is not None:
        return row.truth
    assert row.plain is not None, row.label
    return float(values[row.spec]) / float(values[row.plain])


def judge(rows: Sequence[SignRow], values: dict[str, str]) -> tuple[int, list[str]]:
    """(rows right, a sentence for each miss)."""
    right, misses = 0, []
    for row in rows:
        low, high = (predict_gain(row, al) for al in row.lengths)
        truth = _truth(row, values)
        if abs(truth - 1) < TIE or (low > 1 and truth > 1) or (high < 1 and truth < 1):
            right += 1
        else:
            word = "undecided" if low <= 1 <= high else "wrong"
            misses.append(f"{row.label}: measured {truth:.2f}, predicted {low:.2f}-{high:.2f} ({word})")
    return right, misses


def validate_signs(folder: Path) -> list[Figure]:
    values = {r["id"]: r["value"] for r in read_rows(folder / NAME)}
    right, misses = judge(SIGN_ROWS, values)
    return [
        Figure(
            "published pairs",
            "signs right",
            right / len(SIGN_ROWS),
            0.9,
            False,
            len(SIGN_ROWS),
            "; ".join(misses),
        )
    ]
