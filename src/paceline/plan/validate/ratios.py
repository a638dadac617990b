"""Cost ratios R(D) = T_round / T_plain and the sign of the gain, where acceptance is measured beside the
speed.

R = AL * (speed without) / (speed with) removes acceptance, so it tests the cost model alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.plan.calibration import FITTED, calibrate
from paceline.plan.config import find_model
from paceline.plan.constants import prior_constants
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.mechanisms import Mechanism
from paceline.plan.memory import max_batches
from paceline.plan.scenario import Load, Scenario
from paceline.plan.timings import Ledger, Timing
from paceline.plan.validate.figures import Figure, read_rows

__all__ = ["bundle_ratios", "validate_ratios"]

Array = npt.NDArray[np.float64]
BUNDLE = "acceptance_tables/specbundle_flat.csv"
PUBLISHED = "published_speculation.csv"
_BUNDLE_FORMATS = {"Kimi-K2-Instruct": "fp8", "Qwen3-Next-80B-A3B-Instruct-FP8": "fp8"}
_INVALID = ("Llama-4-Scout-17B-16E-Instruct",)  # its baseline gives R < 1, which cannot be


def ratio(
    scenario: Scenario, mechanism: Mechanism, batch: float, lengths: Sequence[int], context: float
) -> Array:
    """R(D) of the given draft lengths at one batch."""
    every = [0, *lengths]
    ledger = Ledger.of(scenario, mechanism, np.full(len(every), batch), every, np.full(len(every), context))
    seconds = ledger.round_s(scenario.priced_by)
    return np.asarray(seconds[1:] / seconds[0])


def smallest_layout(scenario: Scenario) -> Layout:
    """The smallest tensor parallelism (a power of two) whose devices hold the weights and a batch of 8."""
    for tensor in (1, 2, 4, 8, 16):
        tried = dataclasses.replace(scenario, layout=Layout(tensor), devices=tensor, utilisation=0.95)
        if max_batches(tried, Mechanism("none"), [0], scenario.load.mean_context)[0] >= 8:
            return Layout(tensor)
    return Layout(32)


def bundle_ratios(folder: Path) -> dict[tuple[str, int], tuple[float, float, int, int]]:
    """(model, D) -> (measured median R, predicted R, rows, tensor parallelism). H200, mean context 1024
    tokens.
    """
    rows = read_rows(folder / BUNDLE)
    base, spec = {}, defaultdict(list)
    for r in rows:
        if r["topk"] != "1" or r["model"] in _INVALID:
            continue
        key = (r["model"], r["bench"], r["steps"], r["batch_size"])
        if r["Name"].startswith("Wihtout"):
            base[key] = float(r["output_throughput"])
        else:
            spec[key].append((float(r["accept_length"]), float(r["output_throughput"])))
    measured: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for (model, bench, steps, batch), arms in spec.items():
        for length, speed in arms:
            start = base.get((model, bench, steps, batch))
            if start is not None:
                measured[model, int(steps), float(batch)].append(length * start / speed)
    found = {}
    for (model, length, concurrency), values in measured.items():
        shape = find_model(model)
        scenario = Scenario(
            shape,
            find_hardware("h200"),
            Load(512, 1024),
            Precision.of(shape, _BUNDLE_FORMATS.get(model, "bf16"), "bf16"),
        )
        layout = smallest_layout(scenario)
        scenario = dataclasses.replace(scenario, layout=layout, devices=layout.devices)
        predicted = float(ratio(scenario, Mechanism("eagle3"), concurrency, [length], 1024.0)[0])
        found[model, length] = (float(np.median(values)), predicted, len(values), layout.tensor)
    return found


def _bundle(folder: Path) -> list[Figure]:
    found = bundle_ratios(folder)
    errors = [abs(p / m - 1) for m, p, _, _ in found.values()]
    weights = [n for _, _, n, _ in found.values()]
    listed = [
        Figure(
            "SpecBundle R(D)",
            f"{model} D = {d}, tp {tp}: measured {m:.2f}, predicted {p:.2f}",
            abs(p / m - 1),
            None,
            rows=n,
        )
        for (model, d), (m, p, n, tp) in sorted(found.items())
    ]
    return [
        Figure(
            "SpecBundle R(D)",
            "median error over (model, D), uncalibrated",
            float(np.median(errors)),
            0.15,
            rows=len(errors),
        ),
        Figure(
            "SpecBundle R(D)",
            "median error over rows",
            float(np.median(np.repeat(errors, weights))),
            0.15,
            rows=sum(weights),
        ),
        *listed,
    ]


def _deepseek_rows(folder: Path) -> tuple[Array, Array]:
    """AL and tokens/s/user for D = 0..5 of table A."""
    rows = sorted((r for r in read_rows(folder / PUBLISHED) if r["id"] == "A"), key=lambda r: int(r["D"]))
    speeds = [float(rows[0]["base"]), *(float(r["spec"]) for r in rows)]
    return np.array([1.0, *(float(r["AL"]) for r in rows)]), np.array(speeds)


def deepseek_scenario() -> tuple[Scenario, Mechanism]:
    shape = find_model("deepseek-r1")
    scenario = Scenario(
        shape, find_hardware("b200"), Load(1024, 2048), Precision("bf16", "fp4", "fp8"), Layout(8, 8), 8,
        constants=prior_constants("hbm", "trtllm"),
    )  # fmt: skip
    return scenario, Mechanism("mtp")


def _deepseek(folder: Path) -> list[Figure]:
    """Table A: two of the six draft lengths calibrate the round's costs, the others are predicted."""
    scenario, mechanism = deepseek_scenario()
    lengths, speeds = _deepseek_rows(folder)
    round_s = lengths / speeds
    ledger = Ledger.of(scenario, mechanism, np.ones(6), np.arange(6.0), np.full(6, 2048.0))

    def judge(seconds: Array) -> tuple[float, float]:
        """(largest error of kappa, regret of the best D)."""
        off = np.abs((seconds / seconds[0])[1:] / (round_s / round_s[0])[1:] - 1).max()
        return float(off), float(1 - speeds[int(np.argmax(lengths / seconds))] / speeds.max())

    free = judge(ledger.round_s(scenario.priced_by))
    found = {}
    for pair in combinations(range(6), 2):
        timings = [Timing(1, d, round_s=float(round_s[d])) for d in pair]
        used = Ledger.of(scenario, mechanism, np.ones(2), list(pair), np.full(2, 2048.0))
        fit, predictor = calibrate([used], [timings], scenario.priced_by, FITTED)
        found[pair] = judge(ledger.round_s(predictor.constants(fit.mode)))
    return _deepseek_figures(found, free)


def _deepseek_figures(
    found: dict[tuple[int, int], tuple[float, float]], free: tuple[float, float]
) -> list[Figure]:
    name = "DeepSeek-R1 FP4, MTP, 8 x B200"
    every, figures = np.array(list(found.values())), []
    for i, what, wanted in ((0, "largest error of kappa(D)", 0.05), (1, "regret of the best D", 0.015)):
        worst = f"worst pair {every[:, i].max():.3f}"
        middle = float(np.median(every[:, i]))
        figures += [
            Figure(name, f"{what}, calibrated on D = 0 and 5", found[0, 5][i], wanted, rows=5),
            Figure(name, f"{what}, median over all pairs", middle, wanted, rows=5, note=worst),
            Figure(name, f"{what}, uncalibrated", free[i], None, rows=5),
        ]
    return figures


def validate_ratios(folder: Path) -> list[Figure]:
    return _bundle(folder) + _deepseek(folder)
