"""DeepSeek-V4-Pro with DSpark on 8 x B300 (vLLM blog, 14 Aug 2026): concurrency x draft length, acceptance
unknown.

Six of the 36 points calibrate; the other 30 are predicted. Designs are drawn with a fixed seed. The regret
is the loss of total tokens/s at the worst concurrency when the draft length is chosen by the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.plan.calibration import FITTED, Z80, Fit, Predictor, calibrate, predictive_sd
from paceline.plan.config import find_model
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.mechanisms import Mechanism
from paceline.plan.scenario import Load, Scenario
from paceline.plan.timings import Ledger, Timing
from paceline.plan.validate.figures import Figure, inside_figures, read_rows

__all__ = ["dspark_rows", "dspark_scenario", "validate_dspark"]

Array = npt.NDArray[np.float64]
NAME = "vllm-project.github.io/dspark_pareto_dsv4pro_8xB300.csv"
SEED, DESIGNS = 0, 60
_FITTED = tuple(n for n in FITTED if n not in ("weight_bandwidth", "kv_bandwidth"))


def dspark_scenario() -> tuple[Scenario, Mechanism]:
    """The deployment the figure was measured on. Prompt lengths of the set are not published: about 400
    in.
    """
    shape = find_model("deepseek-v4-pro")
    scenario = Scenario(
        shape, find_hardware("b300"), Load(400, 1000), Precision("fp8", "fp4", "fp8"), Layout(8, 8), 8
    )
    return scenario, Mechanism("dspark", block=7, dtype="fp8")


def dspark_rows(folder: Path) -> list[Timing]:
    return [
        Timing(float(r["concurrency"]), int(r["D"]), tokens_per_s=float(r["output_throughput_tok_s_total"]))
        for r in read_rows(folder / NAME) if r["D"] != "adaptive"
    ]  # fmt: skip


def _ledger(rows: Sequence[Timing]) -> Ledger:
    scenario, mechanism = dspark_scenario()
    batch, length = [t.batch for t in rows], [t.draft_length for t in rows]
    return Ledger.of(scenario, mechanism, batch, length, np.full(len(rows), scenario.load.mean_context))


def _judge(
    fit: Fit, predictor: Predictor, every: Ledger, rows: list[Timing], used: npt.NDArray[np.intp]
) -> tuple[float, float, float]:
    """(mean held-out error, regret at the worst concurrency, share of held-out points inside the 80 %
    interval).
    """

    def predict(x: Array) -> Array:
        return predictor.log_rates(x, [every], [rows])

    observed = np.log([t.tokens_per_s or 0.0 for t in rows])
    rest = np.setdiff1d(np.arange(len(rows)), used)
    predicted, sd = predict(fit.mode), predictive_sd(fit, predict)
    error = np.abs(np.exp(predicted - observed) - 1)[rest].mean()
    regret = []
    batches = np.array([t.batch for t in rows])
    for batch in np.unique(batches):
        here = np.flatnonzero(batches == batch)
        picked = here[np.argmax(predicted[here])]
        regret.append(1 - np.exp(observed[picked] - observed[here].max()))
    inside = (np.abs(predicted - observed) < Z80 * sd)[rest].mean()
    return float(error), float(max(regret)), float(inside)


def _run(rows: list[Timing], every: Ledger, used: npt.NDArray[np.intp]) -> tuple[float, float, float]:
    group = [rows[i] for i in used]
    fit, predictor = calibrate([_ledger(group)], [group], dspark_scenario()[0].priced_by, _FITTED)
    return _judge(fit, predictor, every, rows, used)


def validate_dspark(folder: Path) -> list[Figure]:
    """Random and suggested six-point calibrations."""
    rows = dspark_rows(folder)
    every, rng = _ledger(rows), np.random.default_rng(SEED)
    drawn = [_run(rows, every, np.sort(rng.choice(len(rows), 6, replace=False))) for _ in range(DESIGNS)]
    suggested = []
    for low, high in ((1, 5), (1, 6), (3, 5), (3, 6)):
        used = [i for i, t in enumerate(rows) if t.batch in (1, 128) and t.draft_length in (0, low, high)]
        suggested.append(_run(rows, every, np.array(used)))
    return _figures(np.array(drawn), np.array(suggested))


def _figures(drawn: Array, suggested: Array) -> list[Figure]:
    """Columns of both: error, regret, share inside the interval."""
    name = "DeepSeek-V4-Pro, DSpark, 8 x B300"
    error, regret = float(np.median(drawn[:, 0])), float(np.median(drawn[:, 1]))
    inside = float(drawn[:, 2].mean())
    tails = [f"90th percentile {np.quantile(drawn[:, i], 0.9):.3f}" for i in (0, 1)]
    what = f"median held-out error, {DESIGNS} random 6-point designs"
    best = "mean held-out error of the suggested designs (batch 1 and 128)"
    return [
        Figure(name, what, error, 0.06, rows=30, note=tails[0]),
        Figure(
            name, "median regret of the best D at the worst concurrency", regret, 0.03, rows=6, note=tails[1]
        ),
        *inside_figures(name, inside, 30),
        Figure(
            name, best, float(suggested[:, 0].mean()), error, rows=30, note="wanted: below random designs"
        ),
        Figure(name, "mean regret of the suggested designs", float(suggested[:, 1].mean()), 0.03, rows=6),
    ]
