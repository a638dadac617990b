"""Matrix products (aiconfigurator's GEMM tables, vLLM 0.24): twelve timings fit the product's law, the rest
are held out.

    T = t0 + ((bytes / (e_m BW))^p + (flops / (e_c F))^p)^(1/p)

Rows: n, k >= 1024 (smaller weights stay in cache), m <= 4096. The tables are Parquet and need pyarrow.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import MissingExtra
from paceline.plan.calibration import fit_logs
from paceline.plan.constants import prior_constants
from paceline.plan.hardware import find_hardware
from paceline.plan.validate.figures import Figure

__all__ = ["validate_gemm"]

Array = npt.NDArray[np.float64]
SEED, DRAWS, POINTS = 0, 20, 12
_PRIOR_SD = np.array([0.15, 0.2, 0.5, 0.4])
_SETS = (
    ("h200_sxm", "h200", 0.09),
    ("b200_sxm", "b200", 0.12),
    ("h100_sxm", "h100", None),
    ("l40s", "l40s", None),
)


def _read(path: Path) -> tuple[Array, Array]:
    """([rows, 3] of m, n, k; seconds) of the bf16 products."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingExtra(
            "the GEMM tables are Parquet files: install pyarrow to validate against them"
        ) from error
    columns = parquet.read_table(path, columns=["gemm_dtype", "m", "n", "k", "latency"]).to_pydict()
    kind = np.array(columns["gemm_dtype"])
    size = np.stack([np.array(columns[c], dtype=np.float64) for c in ("m", "n", "k")], axis=1)
    keep = (kind == "bfloat16") & (size[:, 0] <= 4096) & (size[:, 1] >= 1024) & (size[:, 2] >= 1024)
    return size[keep], np.array(columns["latency"], dtype=np.float64)[keep] / 1e3


def _errors(size: Array, seconds: Array, hardware: str, rng: np.random.Generator) -> tuple[float, float]:
    """Held-out mean errors: after a 12-point fit (mean over draws), and under the priors."""
    hw, prior = find_hardware(hardware), prior_constants(find_hardware(hardware).family)
    m, n, k = size.T
    read = 2 * (m * k + n * k + m * n) / hw.bandwidth_bytes_per_s
    math_s = 2 * m * n * k / hw.flops_per_s["bf16"]

    def law(x: Array, rows: npt.NDArray[np.intp]) -> Array:
        a = read[rows] / (prior.weight_bandwidth * np.exp(x[0]))
        b = math_s[rows] / (prior.compute_by_format["bf16"] * np.exp(x[1]))
        p = prior.smoothness * np.exp(x[3])
        high, low = np.maximum(a, b), np.minimum(a, b)
        return np.asarray(np.log(prior.kernel_s * np.exp(x[2]) + high * (1 + (low / high) ** p) ** (1 / p)))

    everything, logs = np.arange(len(m)), np.log(seconds)
    free = float(np.abs(np.exp(law(np.zeros(4), everything) - logs) - 1).mean())
    found = []
    for _ in range(DRAWS):
        used = _design(size, rng)
        fit = fit_logs(partial(law, rows=used), logs[used], ("e_m", "e_c", "t0", "p"), _PRIOR_SD)
        rest = np.setdiff1d(everything, used)
        found.append(np.abs(np.exp(law(fit.mode, rest) - logs[rest]) - 1).mean())
    return float(np.mean(found)), free


def _design(size: Array, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Twelve rows: three of each quarter of m, so that both sides of the ridge are seen."""
    edges = np.quantile(size[:, 0], [0.0, 0.25, 0.5, 0.75, 1.0])
    picked: list[int] = []
    for low, high in itertools.pairwise(edges):
        inside = np.flatnonzero((size[:, 0] >= low) & (size[:, 0] <= high))
        picked += [int(i) for i in rng.choice(inside, POINTS // 4, replace=False)]
    return np.array(sorted(set(picked)))


def validate_gemm(folder: Path) -> list[Figure]:
    found = []
    for system, hardware, wanted in _SETS:
        path = folder / "aiconfigurator" / "data" / system / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
        size, seconds = _read(path)
        error, free = _errors(size, seconds, hardware, np.random.default_rng(SEED))
        found.append(
            Figure(
                f"products {hardware} bf16",
                f"mean held-out error, {POINTS} timings",
                error,
                wanted,
                rows=len(seconds),
                note=f"under the priors {free:.3f}",
            )
        )
    return found
