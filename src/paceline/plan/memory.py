"""Memory: weights, drafter, verification workspace and cache; what is left bounds the batch.

    B_max(D) = (capacity * utilisation - weights - draft weights - workspace(B, D) - reserve)
               / (L (kv + kv_draft) + windows + state (1 + D))

The workspace is the float32 logits of every scored row, a few copies of them: B (1 + D) V * 4 * copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan.hardware import weight_bytes
from paceline.plan.mechanisms import Mechanism, draft_memory
from paceline.plan.scenario import Scenario

__all__ = ["MemoryUse", "cache_capacity_tokens", "max_batch", "memory_use", "verify_workspace_bytes"]

LOGIT_COPIES = 3  # raw, filtered, probabilities
_RESERVE_BYTES = 1.5e9  # activations, graphs and the runtime, per device


def verify_workspace_bytes(
    sequences: float, draft_length: float, vocab: int, copies: int = LOGIT_COPIES
) -> float:
    """Bytes of float32 logits for every row of a verification at full draft length."""
    return sequences * (draft_length + 1) * vocab * 4.0 * copies


def cache_capacity_tokens(
    memory_bytes: float, utilisation: float, weights_bytes: float, draft_bytes: float, workspace_bytes: float,
    cache_bytes_per_token: float, draft_cache_bytes_per_token: float,
) -> float:  # fmt: skip
    """Tokens of context that fit beside target, drafter and workspace; 0 where the weights alone do not
    fit.
    """
    if cache_bytes_per_token <= 0:
        raise InvalidParameter("cache bytes per token", cache_bytes_per_token, "a positive number")
    left = memory_bytes * utilisation - weights_bytes - draft_bytes - workspace_bytes
    return max(0.0, left) / (cache_bytes_per_token + draft_cache_bytes_per_token)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one replica (all its devices), and of one sequence at mean context."""

    capacity: float
    weights: float
    draft_weights: float
    reserve: float
    per_sequence: float
    workspace_per_sequence: float

    @property
    def left_for_sequences(self) -> float:
        return self.capacity - self.weights - self.draft_weights - self.reserve


def memory_use(scenario: Scenario, mechanism: Mechanism, draft_length: float, context: float) -> MemoryUse:
    """Where the memory of one replica goes at draft length D and `context` cached tokens a sequence."""
    shape, p, n = scenario.shape, scenario.precision, scenario.layout.devices
    groups = scenario.layout.attention_groups
    linear = shape.attention_weights * groups + shape.dense_weights
    weights = linear * weight_bytes(p.linear) + shape.expert_weights * weight_bytes(p.experts)
    weights += shape.head_weights * (1 if shape.tied else 2) * 2.0
    draft_weights, draft_cache = draft_memory(mechanism, scenario)
    kv = weight_bytes(p.kv)
    cached = sum(
        a.layers
        * a.row_width
        / a.compression
        * (context if a.window is None else min(context, a.window))
        * kv
        * _copies(a.kv_heads, scenario.layout.tensor)
        for a in shape.attention
    )
    states = shape.state_numbers() * 4.0 * (1 + draft_length)
    return MemoryUse(
        capacity=scenario.hardware.memory_bytes * n * scenario.utilisation,
        weights=float(weights),
        draft_weights=draft_weights,
        reserve=_RESERVE_BYTES * n if scenario.hardware.family in ("hbm", "gddr") else 0.5e9,
        per_sequence=float(cached + draft_cache * context + states),
        workspace_per_sequence=verify_workspace_bytes(1, draft_length, shape.vocab),
    )


def _copies(kv_heads: int, tensor: int) -> float:
    """How often cached rows are stored: devices beyond the key-value heads hold copies."""
    return max(1.0, tensor / kv_heads)


def max_batch(scenario: Scenario, mechanism: Mechanism, draft_length: float, context: float) -> int:
    """Sequences of one replica that fit; `Infeasible` where not even one does, saying by how much."""
    use = memory_use(scenario, mechanism, draft_length, context)
    each = use.per_sequence + use.workspace_per_sequence
    fit = int(use.left_for_sequences / each) if each > 0 else 2**20
    if fit >= 1:
        return fit
    raise Infeasible(_does_not_fit(scenario, mechanism, use, each))


def max_batches(
    scenario: Scenario, mechanism: Mechanism, lengths: npt.ArrayLike, context: float
) -> list[int]:
    """`max_batch` for several draft lengths, 0 where nothing fits."""
    found = []
    for d in np.asarray(lengths, dtype=np.float64).ravel():
        use = memory_use(scenario, mechanism, float(d), context)
        each = use.per_sequence + use.workspace_per_sequence
        found.append(max(0, int(use.left_for_sequences / each)))
    return found


def _does_not_fit(scenario: Scenario, mechanism: Mechanism, use: MemoryUse, each: float) -> str:
    need = use.weights + use.draft_weights + use.reserve + each
    missing = need - use.capacity
    one = (use.capacity - use.reserve) / scenario.layout.devices  # each device keeps its own reserve
    devices = 1
    while devices * one < need - use.reserve and devices < 4096:
        devices *= 2
    drafter = "" if mechanism.kind == "none" else f" with {mechanism.label}"
    smaller = ""
    if scenario.precision.experts not in ("fp4", "int4"):
        linear = weight_bytes(scenario.precision.linear)
        smaller = (
            f", or a smaller number format ({use.weights / 1e9:.0f} GB of weights at {linear:g} bytes each)"
        )
    return (
        f"{scenario.shape.name}{drafter} needs {need / 1e9:.1f} GB and {scenario.layout.devices} x "
        f"{scenario.hardware.title} offer {use.capacity / 1e9:.1f} GB: {missing / 1e9:.1f} GB too little; "
        f"--tp {devices} would fit{smaller}"
    )
