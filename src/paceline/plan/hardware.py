"""Devices: peak rates, memory and links, each row with its source.

`find_hardware(name)` reads the table that travels with the package (`data/devices.json`); a device of your
own is a `Hardware` you build. Peaks are dense, without sparsity. Nothing here is measured by Paceline: the
cost model multiplies peaks by efficiencies (`constants.py`), and calibration replaces those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan.lookup import normalise, read_table, unknown_name

__all__ = ["DTYPES", "Hardware", "find_hardware", "list_hardware", "weight_bytes"]

# Bytes of a stored weight, scales included: nvfp4 one fp8 scale for 16 values, int4 one fp16 scale for 32.
DTYPES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}
# What a matrix unit runs when it lacks the format: the weights are widened on the fly.
_FALLBACK: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "bf16"),
    "int8": ("int8", "bf16"),
    "fp4": ("fp4", "bf16"),
    "int4": ("bf16",),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Rates in FLOP/s and bytes/s, memory in bytes; `link_bytes_per_s` is one direction."""

    name: str
    title: str
    family: str  # "hbm", "gddr", "apple" or "cpu": chooses the efficiency priors
    flops_per_s: Mapping[str, float]  # by number format; a missing format is not there
    bandwidth_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float | None
    devices_per_node: int
    source: str

    def __post_init__(self) -> None:
        if self.family not in ("hbm", "gddr", "apple", "cpu"):
            raise InvalidParameter("family", self.family, "hbm, gddr, apple or cpu")
        for name, value in [("bandwidth", self.bandwidth_bytes_per_s), ("memory", self.memory_bytes)]:
            if not (math.isfinite(value) and value > 0):
                raise InvalidParameter(f"{name} of {self.name}", value, "a positive number")

    def compute_format(self, dtype: str) -> str:
        """The format in which a product with weights of `dtype` runs on this device."""
        if dtype not in _FALLBACK:
            raise InvalidParameter("dtype", dtype, ", ".join(DTYPES))
        for name in _FALLBACK[dtype]:
            if name in self.flops_per_s:
                return name
        raise Infeasible(f"{self.title} lists no rate for {dtype} or anything it can be widened to")

    def ridge_rows(self, dtype: str) -> float:
        """Rows M at which a large product turns compute bound: M* = F * bytes per weight / (2 * BW)."""
        return (
            self.flops_per_s[self.compute_format(dtype)]
            * weight_bytes(dtype)
            / (2 * self.bandwidth_bytes_per_s)
        )


def weight_bytes(dtype: str) -> float:
    """Bytes of one stored weight of `dtype`, its share of scales included."""
    if dtype not in DTYPES:
        raise InvalidParameter("dtype", dtype, ", ".join(DTYPES))
    return DTYPES[dtype]


@functools.cache
def _table() -> tuple[dict[str, Hardware], dict[str, str]]:
    raw = read_table("devices.json")
    columns, sources = raw["columns"], raw["sources"]
    rows: dict[str, Hardware] = {}
    aliases: dict[str, str] = {}
    for values in raw["devices"]:
        row = dict(zip(columns, values, strict=True))
        device = _device(row, sources)
        rows[device.name] = device
        aliases.update({normalise(a): device.name for a in [device.name, device.title, *row["aliases"]]})
    return rows, aliases


def _device(row: Mapping[str, Any], sources: Mapping[str, str]) -> Hardware:
    formats = ("bf16", "fp8", "fp4", "int8")
    return Hardware(
        name=row["name"],
        title=row["title"],
        family=row["family"],
        flops_per_s={k: row[k] * 1e12 for k in formats if row[k] is not None},
        bandwidth_bytes_per_s=row["bandwidth"] * 1e9,
        memory_bytes=row["memory"] * 1e9,
        link_bytes_per_s=None if row["link"] is None else row["link"] * 1e9,
        devices_per_node=row["node"],
        source="; ".join(sources[key] for key in row["source"].split(",")),
    )


def list_hardware() -> list[Hardware]:
    """Every device in the table, in its order."""
    return list(_table()[0].values())


def find_hardware(name: str) -> Hardware:
    """The device of that name, title or alias, or the machine of `probe:FILE`; an unknown one offers the nearest."""
    if name.startswith("probe:"):
        from paceline.plan.probe_import import hardware_of

        return hardware_of(name)
    rows, aliases = _table()
    key = aliases.get(normalise(name))
    if key is None:
        raise unknown_name("hardware", name, rows)
    return rows[key]
