"""The small published table that travels with the package: speeds with their acceptance, predicted from
shapes alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.plan.config import find_model
from paceline.plan.constants import prior_constants
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.lookup import read_table
from paceline.plan.mechanisms import Mechanism
from paceline.plan.scenario import Load, Scenario
from paceline.plan.timings import Ledger
from paceline.plan.validate.figures import Figure

__all__ = ["validate_package"]


def validate_package() -> list[Figure]:
    """Error of R = T_round / T_plain, or of the step time, for each published row; then medians."""
    found = []
    for row in read_table("published.json")["rows"]:
        predicted, measured = _predict(row), float(row["value"])
        found.append(
            Figure(
                row["quantity"],
                f"{row['what']}: measured {measured:g}, predicted {predicted:.3g}",
                abs(predicted / measured - 1),
                None,
                rows=1,
                note="",
            )
        )
    kinds = sorted({f.group for f in found})
    wanted = {"R": 0.15, "step ms": None, "speedup": None}
    heads = [
        Figure(k, "median error", float(np.median([f.value for f in found if f.group == k])), wanted.get(k),
               rows=sum(f.group == k for f in found))
        for k in kinds
    ]  # fmt: skip
    return heads + found


def _predict(row: dict[str, Any]) -> float:
    shape, hardware = find_model(row["model"]), find_hardware(row["hardware"])
    tensor = int(row.get("tp", 1))
    scenario = Scenario(
        shape,
        hardware,
        Load(0, 1),
        Precision.of(shape, row["dtype"]),
        Layout(tensor, tensor if row.get("ep") else 1),
        tensor,
        constants=prior_constants(hardware.family, row.get("engine", "any")),
    )
    mechanism = Mechanism(row.get("kind", "none"))
    d, batch, context = int(row.get("draft_length", 0)), float(row["batch"]), float(row["context"])
    ledger = Ledger.of(scenario, mechanism, [batch, batch], [0, d], [context, context])
    plain, spec = ledger.round_s(scenario.priced_by)
    if row["quantity"] == "step ms":
        return float(spec * 1e3)
    return (
        float(row["acceptance_length"] * plain / spec)
        if row["quantity"] == "speedup"
        else float(spec / plain)
    )
