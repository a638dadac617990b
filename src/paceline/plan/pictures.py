"""The numbers behind the page's pictures: plain lists, so that a plan can be drawn without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.plan.constants import Constants
from paceline.plan.cost import Array, smooth_maximum
from paceline.plan.experts import active_experts, effective_tokens
from paceline.plan.frontier import Candidate
from paceline.plan.hardware import weight_bytes
from paceline.plan.residuals import Spread
from paceline.plan.rounds import target_cost
from paceline.plan.scenario import Scenario

__all__ = ["pictures"]

WIDTHS = (1, 2, 4, 8, 16)  # D = 0, 1, 3, 7, 15


def pictures(candidates: Sequence[Candidate], scenario: Scenario, spread: Spread) -> dict[str, Any]:
    """Curves for the page, by picture."""
    return {
        "frontiers": [_frontier(c, spread) for c in candidates],
        "lengths": [_lengths(c) for c in candidates if c.acceptance is not None],
        "product": _product(scenario),
        "attention": _attention(scenario),
        "experts": _experts(scenario),
    }


def _sample(count: int, most: int = 60) -> list[int]:
    return sorted({round(x) for x in np.geomspace(1, count, min(count, most))}) if count > 1 else [1]


def _frontier(c: Candidate, spread: Spread) -> dict[str, Any]:
    """The best draft length at each batch: [user, device, batch, length, 80 % range of the device's rate]."""
    rows = []
    for n in _sample(len(c.grid.batches)):
        i = n - 1
        fits = c.fits[i, :, 0]
        if fits.any():
            d = int(np.argmax(np.where(fits, c.grid.user_tokens_per_s[i, :, 0], 0)))
            own = c.spread_at(i, d, 0, spread)
            user, device = c.grid.user_tokens_per_s[i, d, 0], c.grid.device_tokens_per_s[i, d, 0]
            rates = [float(user), float(device), device / own.time_high, device / own.time_low]
            low_high = [round(float(r), 3) for r in rates]
            rows.append([*low_high[:2], int(c.grid.batches[i]), int(c.grid.lengths[d]), *low_high[2:]])
    return {"mechanism": c.mechanism.label, "points": rows}


def _lengths(c: Candidate) -> dict[str, Any]:
    rows = []
    for n in _sample(len(c.grid.batches)):
        best = int(np.argmax(c.grid.speedup[n - 1, :, 0]))
        rows.append([int(c.grid.batches[n - 1]), int(c.grid.lengths[best]),
                     round(float(c.grid.speedup[n - 1, best, 0]), 4)])  # fmt: skip
    return {"mechanism": c.mechanism.label, "points": rows}


def _product(s: Scenario) -> dict[str, Any]:
    """Time and share of the peak of one square product of the model's width, for batches and D = 0, 1, 3, 7,
    15.
    """
    c: Constants = s.priced_by
    hidden, dtype = s.shape.hidden, s.precision.linear
    fmt = s.hardware.compute_format(dtype)
    peak = s.hardware.flops_per_s[fmt]
    curves = []
    batches = np.unique(np.round(np.geomspace(1, 1024, 60)))
    for width in WIDTHS:
        rows = batches * width
        read = (hidden * hidden * weight_bytes(dtype) + 4 * rows * hidden) / s.hardware.bandwidth_bytes_per_s
        work = 2 * rows * hidden * hidden / peak
        seconds = c.kernel_s + smooth_maximum(
            read / c.weight_bandwidth, work / (c.compute * c.compute_by_format[fmt]), c.smoothness
        )
        curves.append({
            "draft_length": width - 1,
            "points": [[int(b), int(m), round(float(t) * 1e6, 3), round(float(u), 4)]
                       for b, m, t, u in zip(batches, rows, seconds, work / seconds, strict=True)],
        })  # fmt: skip
    return {"size": hidden, "format": fmt, "curves": curves}


def _attention(s: Scenario) -> dict[str, Any]:
    """Attention of one step against the draft length, relative to D = 0, at three contexts."""
    lengths = np.arange(0, 33)
    curves = []
    for context in (2048, 32768, 131072):
        work = target_cost(s, 16.0, 1.0 + lengths, float(context)).by_operator_s.get("attention")
        if work is None:
            continue
        ms: Array = np.asarray(work) * np.ones(len(lengths)) * 1e3
        curves.append(
            {
                "context": context,
                "points": [[int(d), round(float(t), 4)] for d, t in zip(lengths, ms, strict=True)],
            }
        )
    full = [a for a in s.shape.attention if a.kind != "linear"]
    group = max(1.0, full[0].heads / s.layout.tensor) / max(1.0, full[0].kv_heads / s.layout.tensor)
    return {"group": group, "curves": curves, "batch": 16}


def _experts(s: Scenario) -> dict[str, Any] | None:
    moe = [f for f in s.shape.feed_forward if f.experts]
    if not moe:
        return None
    f, c = moe[0], s.priced_by
    tokens = np.unique(np.round(np.geomspace(1, 4096, 60)))
    independent = active_experts(f.experts, f.active, tokens, c.routing_skew)
    alike = active_experts(
        f.experts, f.active, effective_tokens(1.0, tokens, c.routing_correlation), c.routing_skew
    )
    return {
        "experts": f.experts, "active": f.active,
        "points": [[int(t), round(float(a), 2), round(float(b), 2)]
                   for t, a, b in zip(tokens, independent, alike, strict=True)],
    }  # fmt: skip
