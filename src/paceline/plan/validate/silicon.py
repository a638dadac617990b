"""Time per output token without speculation, 2,144 end-to-end rows of aiconfigurator's silicon sample (set
B).

Row filter, as in docs/planning.md: mode agg, no pipeline parallelism, attention data parallelism 1 or not
stated; dense: Llama-3.1-8B/70B and Qwen3-32B; mixture: MiniMax-M2.5, Qwen3-235B, gpt-oss-120b. The request
concurrency is the batch; the mean context is prompt + half the answer; the prefill of others delays decoding
by the prior's share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.plan.calibration import FITTED, Z80, calibrate, predictive_sd
from paceline.plan.config import find_model
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.mechanisms import Mechanism
from paceline.plan.scenario import Load, Scenario
from paceline.plan.timings import Ledger, Timing
from paceline.plan.validate.figures import Figure, inside_figures, read_rows

__all__ = ["SiliconRow", "silicon_rows", "validate_silicon"]

Array = npt.NDArray[np.float64]
NAME = "aiconfigurator/silicon_sample.csv"
SEED, DRAWS, POINTS = 0, 3, 8
_FORMATS = {"": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": ("dense", "llama-3.1-8b"),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("dense", "llama-3.1-8b"),
    "meta-llama/Llama-3.1-70B": ("dense", "llama-3.1-70b"),
    "Qwen/Qwen3-32B": ("dense", "qwen3-32b"),
    "nvidia/Qwen3-32B-NVFP4": ("dense", "qwen3-32b"),
    "MiniMaxAI/MiniMax-M2.5": ("moe", "minimax-m2.5"),
    "Qwen/Qwen3-235B-A22B-FP8": ("moe", "qwen3-235b-a22b"),
    "openai/gpt-oss-120b": ("moe", "gpt-oss-120b"),
}
_SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200"}
_FITTED = tuple(n for n in FITTED if n not in ("round_s", "draft_step_s"))  # nothing drafts in these rows


@dataclass(frozen=True, slots=True)
class SiliconRow:
    """One measured point with the scenario it was measured in; rates are total tokens/s of the replica."""

    family: str
    group: str
    scenario: Scenario
    timing: Timing


def silicon_rows(folder: Path) -> list[SiliconRow]:
    """The rows that the filter keeps."""
    found = []
    for r in read_rows(folder / NAME):
        known = _MODELS.get(r["model_path"])
        if (
            known is None
            or r["mode"] != "agg"
            or r["pp_size"] != "1"
            or r["attention_dp_size"] not in ("", "0", "1")
        ):
            continue
        family, name = known
        shape, hardware = find_model(name), find_hardware(_SYSTEMS[r["system"]])
        dtype = _FORMATS[r["gemm_quant_mode"] or r["precision"].replace("fp4", "nvfp4")]
        tensor = int(r["tp_size"] or 1)
        layout = Layout(tensor, tensor if int(r["moe_ep_size"] or 1) > 1 else 1)
        batch = float(r["batch_size"])
        scenario = Scenario(
            shape,
            hardware,
            Load(float(r["isl"]), float(r["osl"])),
            Precision.of(shape, dtype),
            layout,
            layout.devices,
        )
        rate = batch / (float(r["silicon_tpot_ms"]) / 1e3)
        group = f"{r['model_path'].split('/')[-1]} {hardware.name} {r['backend']} {dtype}"
        found.append(SiliconRow(family, group, scenario, Timing(batch, 0, tokens_per_s=rate)))
    return found


def _ledgers(rows: Sequence[SiliconRow]) -> tuple[list[Ledger], list[list[Timing]]]:
    """One ledger for the rows of a scenario (same lengths, same parallelism)."""
    parts: dict[tuple[float, float, int, int], list[SiliconRow]] = defaultdict(list)
    for r in rows:
        s = r.scenario
        parts[(s.load.prompt_tokens, s.load.output_tokens, s.layout.tensor, s.layout.expert)].append(r)
    ledgers = [
        Ledger.of(p[0].scenario, Mechanism("none"), [r.timing.batch for r in p], np.zeros(len(p)),
                  np.full(len(p), p[0].scenario.load.mean_context))
        for p in parts.values()
    ]  # fmt: skip
    return ledgers, [[r.timing for r in p] for p in parts.values()]


def uncalibrated(rows: Sequence[SiliconRow]) -> tuple[Array, list[str]]:
    """log(predicted / measured time per token) of each row under the priors, and its group."""
    groups: dict[str, list[SiliconRow]] = defaultdict(list)
    for r in rows:
        groups[r.group].append(r)
    logs: list[float] = []
    names: list[str] = []
    for name, members in groups.items():
        ledgers, timings = _ledgers(members)
        c = members[0].scenario.priced_by
        for ledger, group in zip(ledgers, timings, strict=True):
            rates = ledger.tokens_per_s(c, np.ones(len(group)))
            logs += [float(np.log((t.tokens_per_s or 0.0) / r)) for t, r in zip(group, rates, strict=True)]
            names += [name] * len(group)
    return np.array(logs), names


def _calibrated(rows: list[SiliconRow], rng: np.random.Generator) -> tuple[list[float], list[bool]]:
    """Held-out errors and interval hits of one random calibration of one group."""
    order = rng.permutation(len(rows))
    used, rest = [rows[i] for i in order[:POINTS]], [rows[i] for i in order[POINTS:]]
    ledgers, timings = _ledgers(used)
    fit, predictor = calibrate(ledgers, timings, rows[0].scenario.priced_by, _FITTED)
    held, wanted = _ledgers(rest)
    observed = np.log([t.tokens_per_s or 0.0 for group in wanted for t in group])

    def predict(x: Array) -> Array:
        return predictor.log_rates(x, held, wanted)

    predicted = predict(fit.mode)
    inside = np.abs(predicted - observed) < Z80 * predictive_sd(fit, predict)
    return [float(e) for e in np.abs(np.exp(observed - predicted) - 1)], [bool(i) for i in inside]


def _left_out_coverage(logs: Array, names: list[str]) -> float:
    """Share of rows inside the 80 % range of the other groups' residuals."""
    groups = np.array(names)
    hits = []
    for name in sorted(set(names)):
        own = groups == name
        low, high = np.quantile(logs[~own], [0.1, 0.9])
        hits.append(((logs[own] >= low) & (logs[own] <= high)).sum())
    return float(sum(hits) / len(logs))


def validate_silicon(folder: Path) -> list[Figure]:
    """Uncalibrated and 8-point calibrated errors of both families, then the uncalibrated groups."""
    every = silicon_rows(folder)
    found, listed = [], []
    for family, free, bound in (("dense", 0.18, 0.10), ("moe", 0.24, 0.135)):
        rows = [r for r in every if r.family == family]
        heads, groups = _without(family, rows, free)
        found += heads + _with(family, rows, bound)
        listed += groups
    return found + listed


def _without(family: str, rows: list[SiliconRow], wanted: float) -> tuple[list[Figure], list[Figure]]:
    """Errors under the priors: all rows, and group by group."""
    logs, names = uncalibrated(rows)
    errors, picked, title = np.abs(np.exp(logs) - 1), np.array(names), f"silicon {family}"
    tail = f"median {np.median(errors):.3f}"
    outside = "rows inside 80 % ranges taken from the other groups"
    heads = [
        Figure(title, "mean error, uncalibrated", float(errors.mean()), wanted, rows=len(rows), note=tail),
        Figure(
            title, outside, _left_out_coverage(logs, names), None, rows=len(rows), note="wanted 0.7 to 0.9"
        ),
    ]
    groups = [
        Figure(
            title,
            f"{n}, uncalibrated",
            float(errors[picked == n].mean()),
            None,
            rows=int((picked == n).sum()),
        )
        for n in sorted(set(names))
    ]
    return heads, groups


def _with(family: str, rows: list[SiliconRow], wanted: float) -> list[Figure]:
    """Held-out errors after random calibrations of each group."""
    rng, title = np.random.default_rng(SEED), f"silicon {family}"
    held: list[float] = []
    inside: list[bool] = []
    for name in sorted({r.group for r in rows}):
        members = [r for r in rows if r.group == name]
        for _ in range(DRAWS if len(members) > POINTS else 0):
            errors, hits = _calibrated(members, rng)
            held, inside = held + errors, inside + hits
    what, tail = f"mean held-out error, {POINTS} points a group", f"median {np.median(held):.3f}"
    error = Figure(title, what, float(np.mean(held)), wanted, rows=len(held), note=tail)
    return [error, *inside_figures(title, float(np.mean(inside)), len(held))]
