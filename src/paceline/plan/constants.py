"""The constants of the cost model: what separates a data sheet from a clock.

Priors per device family come from operator timings published by aiconfigurator (GEMM, attention,
mixture-of-experts and all-reduce tables at 095f58a; fits in docs/planning.md) and from published speculative
rounds; none was fitted to the end-to-end rows that `paceline validate` predicts. Each carries a log standard
deviation, so that calibration and the bands start from the same place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import InvalidParameter

__all__ = ["ENGINES", "PRIOR_SD", "Constants", "prior_constants"]


@dataclass(frozen=True, slots=True)
class Constants:
    """Efficiencies are fractions of the peak; `_s` are seconds.

    weight_bandwidth, expert_bandwidth, kv_bandwidth   reading dense weights, expert weights, cached rows
    compute                multiplies the format's own fraction in `compute_by_format`
    kernel_s               start of a matrix product inside a captured graph
    attention_s, pair_s    start of an attention kernel; of one (sequence, key-value head) pair
    experts_s              routing, permutation and start of a mixture-of-experts layer
    elementwise_s          one small kernel (norm, rotary, residual, activation)
    collective_s, link     one all-reduce or all-to-all; fraction of the link's rate
    starts                 multiplies every start below the host's: kernels, attention, experts, collectives
    row_s                  per scored row beyond its operators (sampling, permutation, quantisation,
                           bookkeeping)
    host_s                 scheduling that the device waits for, per step
    round_s                what a speculative round costs beyond its passes (acceptance test, bookkeeping)
    draft_step_s           one step of a serial drafter beyond its pass
    prefill                fraction of a prefill's time that delays decoding
    smoothness             p of the smooth maximum (bytes^p + flops^p)^(1/p)
    routing_correlation    how alike tokens of one request route, 0 independent to 1 the same experts
    routing_skew           Zipf exponent of expert popularity
    """

    weight_bandwidth: float = 0.82
    expert_bandwidth: float = 0.80
    kv_bandwidth: float = 0.85
    compute: float = 1.0
    kernel_s: float = 4.0e-6
    attention_s: float = 11.5e-6
    pair_s: float = 2.0e-9
    experts_s: float = 18e-6
    elementwise_s: float = 2.0e-6
    collective_s: float = 9.0e-6
    link: float = 0.7
    starts: float = 1.0
    row_s: float = 2.0e-6
    host_s: float = 0.5e-3
    round_s: float = 1.0e-3
    draft_step_s: float = 0.12e-3
    prefill: float = 0.8
    smoothness: float = 3.0
    routing_correlation: float = 0.4
    routing_skew: float = 0.0
    compute_by_format: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"bf16": 0.76, "fp8": 0.58, "fp4": 0.47, "int8": 0.5}
    )

    def scaled(self, logs: Mapping[str, float]) -> Constants:
        """These constants with exp(logs[name]) times the named ones."""
        return self.replaced({k: getattr(self, k) * math.exp(v) for k, v in logs.items()})

    def replaced(self, values: Mapping[str, float]) -> Constants:
        """These constants with the named ones set."""
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Constants(**{**known, **values})


# Log standard deviations of the priors: about 20 % for efficiencies, 40 % for kernel starts, and wide for
# what engines differ in most, the host time of a step and the cost of a row.
PRIOR_SD: Mapping[str, float] = {
    "weight_bandwidth": 0.15,
    "expert_bandwidth": 0.25,
    "kv_bandwidth": 0.25,
    "compute": 0.25,
    "kernel_s": 0.4,
    "attention_s": 0.4,
    "experts_s": 0.5,
    "elementwise_s": 0.4,
    "collective_s": 0.4,
    "starts": 0.4,
    "row_s": 1.5,
    "host_s": 1.0,
    "round_s": 0.5,
    "draft_step_s": 0.8,
    "prefill": 0.4,
}

_BY_FAMILY: Mapping[str, Mapping[str, float]] = {
    "hbm": {},
    "gddr": {"weight_bandwidth": 0.80, "expert_bandwidth": 0.75, "kv_bandwidth": 0.76, "compute": 0.95},
    # Unified memory and CPUs launch per operator and hide little: calibrate; three batch sizes are enough.
    "apple": {"weight_bandwidth": 0.70, "expert_bandwidth": 0.55, "kv_bandwidth": 0.60, "compute": 0.75},
    "cpu": {
        "weight_bandwidth": 0.70,
        "expert_bandwidth": 0.55,
        "kv_bandwidth": 0.60,
        "compute": 0.55,
        "kernel_s": 10e-6,
        "attention_s": 20e-6,
        "elementwise_s": 4e-6,
    },
}


# TensorRT-LLM drafts and tests acceptance inside the captured graph (one-engine MTP and EAGLE-3), so a round
# costs little beyond its passes; the other engines return to the host between the passes (0.8 to 1.9 ms
# measured).
ENGINES: Mapping[str, Mapping[str, float]] = {
    "any": {},
    "vllm": {},
    "sglang": {},
    "trtllm": {"round_s": 0.2e-3},
    "llamacpp": {},
    "transformers": {},
    "openvino": {},
}


def prior_constants(family: str, engine: str = "any") -> Constants:
    """The prior for a device family ("hbm", "gddr", "apple" or "cpu") under an engine, "any" where none is
    chosen.
    """
    if engine not in ENGINES:
        raise InvalidParameter("engine", engine, ", ".join(ENGINES))
    return Constants().replaced({**_BY_FAMILY[family], **ENGINES[engine]})
