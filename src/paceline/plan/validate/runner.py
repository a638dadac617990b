"""Which sets there are, and the residual table that uncalibrated plans take their bands from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.plan.validate.figures import Figure

__all__ = ["run_set", "write_residuals"]


def run_set(name: str, folder: Path | None) -> list[Figure]:
    """The figures of one set; `package` needs no folder."""
    if name == "package":
        from paceline.plan.validate.package import validate_package

        return validate_package()
    if folder is None or not folder.is_dir():
        raise UsageError(f"--data is {str(folder)!r}; give the folder that holds the measurement sets")
    from paceline.plan.validate import dspark, gemm, published, ratios, signs, silicon

    sets = {
        "dspark": dspark.validate_dspark,
        "gemm": gemm.validate_gemm,
        "published": published.validate_published,
        "ratios": ratios.validate_ratios,
        "signs": signs.validate_signs,
        "silicon": silicon.validate_silicon,
    }
    return sets[name](folder)


def write_residuals(folder: Path | None, path: Path) -> None:
    """Quantiles of log(predicted / measured) by group: times from the silicon rows, (R - 1) from
    SpecBundle.
    """
    if folder is None:
        raise UsageError("--write-residuals needs --data DIR")
    from paceline.plan.config import find_model
    from paceline.plan.validate.ratios import bundle_ratios
    from paceline.plan.validate.silicon import silicon_rows, uncalibrated

    rows = silicon_rows(folder)
    time: dict[str, Any] = {}
    for family in ("dense", "moe"):
        logs, _ = uncalibrated([r for r in rows if r.family == family])
        time[family] = _quantiles(logs)
    ratios: dict[str, list[float]] = {"dense": [], "moe": []}
    for (model, _), (measured, predicted, _, _) in bundle_ratios(folder).items():
        family = "moe" if find_model(model).is_moe else "dense"
        ratios[family].append(float(np.log((predicted - 1) / (measured - 1))))
    # Few models stand behind the ratios, so their range is never taken narrower than +-25 %.
    ratio = {k: _quantiles(np.array(v), least=0.25) for k, v in ratios.items()}
    table = {"schema": "paceline.residuals/1", "time": time, "ratio": ratio, "unvalidated_factor": 1.3}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _quantiles(logs: np.ndarray[Any, np.dtype[np.float64]], least: float = 0.0) -> dict[str, float]:
    low, high = np.quantile(logs, [0.1, 0.9])
    return {
        "q10": round(min(float(low), -least), 4),
        "q90": round(max(float(high), least), 4),
        "rows": len(logs),
    }
