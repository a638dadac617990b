"""Time of one target pass, over arrays: work is counted once, then priced by the constants.

    T(B, q, L) = host + sum over operators of  start + (bytes_s^p + flops_s^p)^(1/p)

bytes_s and flops_s are the seconds the operator needs at the attainable memory and compute rate; q = 1 + D
tokens of each of B sequences with L cached tokens. Weights are read once a pass, cached rows once a sequence,
however many tokens are scored (facts of the roofline: arXiv 2211.17192 section 3.4; attention intensity
2G(1+D): NVIDIA co-design post, part 3). Rows are padded to graph buckets and matrix tiles, so the steps stay
visible.

`step_time` is pure: same arguments, same answer. Arrays broadcast; a grid is one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidParameter
from paceline.plan.constants import Constants, prior_constants
from paceline.plan.experts import active_experts, effective_tokens
from paceline.plan.hardware import Hardware, weight_bytes
from paceline.plan.shape import Attention, FeedForward, ModelShape

__all__ = ["Layout", "Precision", "StepCost", "Work", "count_work", "pad_rows", "price", "step_time"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of the linear weights, the expert weights and the cached keys and values."""

    linear: str = "bf16"
    experts: str = "bf16"
    kv: str = "bf16"

    def __post_init__(self) -> None:
        for name in (self.linear, self.experts, self.kv):
            weight_bytes(name)

    @classmethod
    def of(cls, shape: ModelShape, dtype: str, kv: str | None = None) -> Precision:
        """`dtype` where the model's releases quantise; the cache follows at fp8 unless given."""
        linear = "bf16" if shape.keeps_linear_bf16 and dtype in ("fp4", "int4") else dtype
        cache = kv or ("bf16" if dtype in ("bf16", "int4", "int8") or shape.keeps_linear_bf16 else "fp8")
        return cls(linear, dtype, cache)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one replica spreads over devices: `tensor` ways inside a layer, experts over `expert` devices.

    `expert` larger than `tensor` means attention runs data-parallel over expert / tensor groups.
    """

    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tensor), ("ep", self.expert)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(name, value, "a whole number from 1")
        big, small = max(self.tensor, self.expert), min(self.tensor, self.expert)
        if big % small:
            raise InvalidParameter("ep", self.expert, f"a multiple or a divisor of tp ({self.tensor})")

    @property
    def devices(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def attention_groups(self) -> int:
        return self.devices // self.tensor


@dataclass(frozen=True, slots=True)
class Work:
    """One operator over the whole grid, before any efficiency is applied.

    bytes_s, flops_s   seconds at the peak rates, as arrays that broadcast
    starts             kernels started, by constant: {"kernel_s": 128}
    bandwidth, format  which efficiencies price it
    """

    name: str
    bytes_s: Array
    flops_s: Array
    starts: dict[str, Any]
    bandwidth: str
    format: str
    hard: bool = False  # collectives: a sum of latency and transfer, no overlap with anything


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds by operator, arrays of one shape; `total_s` is their sum."""

    by_operator_s: dict[str, Array]

    @property
    def total_s(self) -> Array:
        parts = list(self.by_operator_s.values())
        total: Array = parts[0] * 1.0
        for part in parts[1:]:
            total = total + part
        return total


def pad_rows(rows: Array) -> Array:
    """Rows as a captured graph runs them: 1, 2, 4, multiples of 8 to 256, multiples of 16 beyond."""
    rows = np.asarray(rows, dtype=np.float64)
    small = np.where(
        rows <= 1, 1.0, np.where(rows <= 2, 2.0, np.where(rows <= 4, 4.0, np.ceil(rows / 8) * 8))
    )
    return np.where(rows <= 256, small, np.ceil(rows / 16) * 16)


def _tile(rows: Array, fmt: str) -> Array:
    """Rows that the matrix unit computes. Measured steps at 64 and 128 for fp8 and fp4, almost none for
    bf16.
    """
    if fmt in ("fp8", "fp4", "int8"):
        return np.where(rows <= 64, 64.0, np.ceil(rows / 128) * 128)
    return np.ceil(rows / 16) * 16


def count_work(
    shape: ModelShape,
    hardware: Hardware,
    batch: npt.ArrayLike,
    width: npt.ArrayLike,
    context: npt.ArrayLike,
    precision: Precision,
    layout: Layout,
    constants: Constants,
    head_rows: npt.ArrayLike | None = None,
    padded: bool = True,
) -> list[Work]:
    """The operators of one pass. `head_rows` are the rows that need logits (default: every row)."""
    b = np.asarray(batch, dtype=np.float64) / layout.attention_groups
    q = np.asarray(width, dtype=np.float64)
    ctx = np.asarray(context, dtype=np.float64)
    rows = pad_rows(b * q) if padded else b * q
    work = [_linear(a, shape, hardware, rows, precision, layout) for a in shape.attention]
    work += [w for a in shape.attention for w in _attend(a, hardware, b, q, ctx, precision, layout)]
    for f in shape.feed_forward:
        work += _feed(f, shape, hardware, rows, b, q, precision, layout, constants)
    head = rows if head_rows is None else np.asarray(head_rows, dtype=np.float64)
    work += [_head(shape, hardware, head, precision, layout), _small(shape, hardware, rows)]
    if layout.devices > 1:
        work.append(_collective(shape, hardware, rows, layout))
    return work


def _product(
    name: str, weights: float, rows: Array, count: float, hardware: Hardware, dtype: str, moved: float
) -> Work:
    """`count` products against `weights` numbers in all; `moved` activation numbers per row."""
    fmt = hardware.compute_format(dtype)
    read = weights * weight_bytes(dtype) + rows * moved * 2
    return Work(
        name,
        read / hardware.bandwidth_bytes_per_s,
        2 * weights * _tile(rows, fmt) / hardware.flops_per_s[fmt],
        {"kernel_s": count},
        "weight_bandwidth",
        fmt,
    )


def _linear(a: Attention, shape: ModelShape, hw: Hardware, rows: Array, p: Precision, layout: Layout) -> Work:
    kernels = 2.0 if a.kind == "full" else 4.0
    moved = a.layers * (2 * shape.hidden + 2 * a.heads * a.value_dim / layout.tensor)
    return _product(
        "projections", a.layers * a.weights / layout.tensor, rows, a.layers * kernels, hw, p.linear, moved
    )


def _attend(
    a: Attention, hw: Hardware, b: Array, q: Array, ctx: Array, p: Precision, layout: Layout
) -> list[Work]:
    if a.kind == "linear":
        return [_recurrent(a, hw, b, q, layout)]
    heads = max(1.0, a.heads / layout.tensor)
    kv_heads = max(1.0, a.kv_heads / layout.tensor)
    share = kv_heads / a.kv_heads
    seen = ctx if a.window is None else np.minimum(ctx, a.window)
    seen = seen / a.compression
    fmt = "bf16"
    if a.selected is not None:
        # Each query reads its own selection, so nothing is shared between the tokens of a request.
        read, scored = q * np.minimum(seen, a.selected), heads * q
        seen = np.minimum(seen, a.selected)
    else:
        read, scored = seen, kv_heads * _attention_tile(heads / kv_heads * q)
    bytes_read = a.layers * b * read * a.row_width * share * weight_bytes(p.kv)
    flops = a.layers * 2 * b * scored * seen * (a.head_dim + a.value_dim)
    return [
        Work(
            "attention",
            bytes_read / hw.bandwidth_bytes_per_s,
            flops / hw.flops_per_s[fmt],
            {"attention_s": float(a.layers), "pair_s": a.layers * b * kv_heads},
            "kv_bandwidth",
            fmt,
        )
    ]


def _attention_tile(rows: Array) -> Array:
    """Query rows per key-value head as the kernel computes them: 16, 32, 64, then multiples of 128."""
    return np.where(
        rows <= 16, 16.0, np.where(rows <= 32, 32.0, np.where(rows <= 64, 64.0, np.ceil(rows / 128) * 128))
    )


def _recurrent(a: Attention, hw: Hardware, b: Array, q: Array, layout: Layout) -> Work:
    """A state is read and written for every token: .53 + .445 q of a single token's time (measured, KDA on
    H200).
    """
    state = 2 * 4 * a.state_numbers / layout.tensor
    return Work(
        "state",
        a.layers * b * state * (0.53 + 0.445 * q) / hw.bandwidth_bytes_per_s,
        np.zeros(()),
        {"attention_s": float(a.layers)},
        "kv_bandwidth",
        "bf16",
    )


def _feed(
    f: FeedForward, shape: ModelShape, hw: Hardware, rows: Array, b: Array, q: Array,
    p: Precision, layout: Layout, c: Constants,
) -> list[Work]:  # fmt: skip
    found = []
    dense = f.shared_inner if f.experts else f.inner
    if dense:
        weights = f.layers * f.matrices * shape.hidden * dense / layout.tensor
        moved = f.layers * (2 * shape.hidden + 2 * dense / layout.tensor)
        found.append(_product("feed-forward", weights, rows, 2.0 * f.layers, hw, p.linear, moved))
    if f.experts:
        found.append(_experts(f, shape, hw, b * layout.attention_groups, q, p, layout, c))
    return found


def _experts(
    f: FeedForward,
    shape: ModelShape,
    hw: Hardware,
    b: Array,
    q: Array,
    p: Precision,
    layout: Layout,
    c: Constants,
) -> Work:
    tokens = b * q
    touched = active_experts(
        f.experts, f.active, effective_tokens(b, q, c.routing_correlation), c.routing_skew
    )
    uneven = (
        1.15 if layout.expert > 1 else 1.0
    )  # the slowest device holds more than its share of busy experts
    weights = f.matrices * shape.hidden * f.inner
    moved = tokens * f.active * (2 * shape.hidden + 2 * f.inner) * 2
    bytes_read = f.layers * (touched * weights * weight_bytes(p.experts) + moved) * uneven / layout.devices
    fmt = hw.compute_format(p.experts)
    per_expert = np.maximum(tokens * f.active / np.maximum(touched, 1.0), 1.0)
    computed = touched * np.where(fmt == "bf16", np.ceil(per_expert / 16) * 16, np.ceil(per_expert / 64) * 64)
    flops = 2.0 * f.layers * weights * computed * uneven / layout.devices
    return Work(
        "experts",
        bytes_read / hw.bandwidth_bytes_per_s,
        flops / hw.flops_per_s[fmt],
        {"experts_s": float(f.layers)},
        "expert_bandwidth",
        fmt,
    )


def _head(shape: ModelShape, hw: Hardware, rows: Array, p: Precision, layout: Layout) -> Work:
    """Logits of every row and three passes over them in float32 (scale, filter, draw)."""
    work = _product("head", shape.head_weights / layout.tensor, rows, 1.0, hw, "bf16", shape.hidden)
    logits = rows * shape.vocab * 4 * 3 / hw.bandwidth_bytes_per_s
    return Work(
        "head",
        work.bytes_s + logits,
        work.flops_s,
        {"kernel_s": 1.0, "elementwise_s": 8.0, "row_s": rows},
        "weight_bandwidth",
        work.format,
    )


def _small(shape: ModelShape, hw: Hardware, rows: Array) -> Work:
    moved = shape.layers * rows * shape.hidden * 2 * 8
    return Work("small kernels", moved / hw.bandwidth_bytes_per_s, np.zeros(()),
                {"elementwise_s": 5.0 * shape.layers}, "weight_bandwidth", "bf16")  # fmt: skip


def _collective(shape: ModelShape, hw: Hardware, rows: Array, layout: Layout) -> Work:
    """Two all-reduces a layer; data-parallel attention exchanges tokens with the experts instead."""
    n, layers = layout.devices, shape.layers
    link = hw.link_bytes_per_s
    if link is None:
        raise InvalidParameter("tp", layout.tensor, f"1 on {hw.title}, which has no link between devices")
    size = rows * shape.hidden * 2
    moved = 2.0 * layers * (2 * (n - 1) / n) * size
    starts = 2.0 * layers * (1.0 if link > 1e11 else 2.0)
    if layout.attention_groups > 1:
        active = max(f.active for f in shape.feed_forward) or 1
        moved = 2.0 * layers * size * active * (n - 1) / n
    return Work(
        "collectives", moved / link, np.zeros(()), {"collective_s": starts}, "link", "bf16", hard=True
    )


_STARTS = ("kernel_s", "attention_s", "experts_s", "elementwise_s", "collective_s")


def price(work: Iterable[Work], constants: Constants) -> StepCost:
    """Seconds of counted work under `constants`, by operator, host time included."""
    found: dict[str, Array] = {"host": np.asarray(constants.host_s, dtype=np.float64)}
    for w in work:
        read = w.bytes_s / getattr(constants, w.bandwidth)
        math_s = w.flops_s / (constants.compute * constants.compute_by_format[w.format])
        seconds = read if w.hard else smooth_maximum(read, math_s, constants.smoothness)
        for name, count in w.starts.items():
            each = getattr(constants, name) * (constants.starts if name in _STARTS else 1.0)
            seconds = seconds + each * count
        found[w.name] = found[w.name] + seconds if w.name in found else seconds
    return StepCost(found)


def smooth_maximum(a: Array, b: Array, p: float) -> Array:
    """(a^p + b^p)^(1/p); p = 3, the usual case, without logarithms."""
    if p == 3.0:
        return np.cbrt(a * a * a + b * b * b)
    high, low = np.maximum(a, b), np.minimum(a, b)
    ratio = np.divide(low, high, out=np.zeros_like(high * low), where=high > 0)
    result: Array = high * (1 + ratio**p) ** (1 / p)
    return result


def step_time(
    shape: ModelShape,
    hardware: Hardware,
    batch: npt.ArrayLike,
    context: npt.ArrayLike,
    width: npt.ArrayLike = 1.0,
    precision: Precision | None = None,
    layout: Layout | None = None,
    constants: Constants | None = None,
) -> StepCost:
    """Seconds of one target pass over `batch` sequences of `context` cached tokens, `width` tokens each."""
    for name, value in (("batch", batch), ("width", width), ("context", context)):
        if np.min(value) < (0 if name == "context" else 1):
            raise InvalidParameter(
                name, float(np.min(value)), "1 or more" if name != "context" else "0 or more"
            )
    c = constants or prior_constants(hardware.family)
    work = count_work(
        shape, hardware, batch, width, context, precision or Precision(), layout or Layout(), c
    )  # fmt: skip
    return price(work, c)
