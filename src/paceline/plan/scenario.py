"""What is planned for: a model on devices under a load. One frozen value, handed to every function of the
planner.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from paceline.errors import InvalidParameter
from paceline.plan.constants import Constants, prior_constants
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import Hardware
from paceline.plan.shape import ModelShape

__all__ = ["Load", "Scenario", "with_constants"]


@dataclass(frozen=True, slots=True)
class Load:
    """Mean prompt and answer lengths in tokens; `concurrency` bounds the requests in flight (None: memory
    does).
    """

    prompt_tokens: float
    output_tokens: float
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name, value, low in (
            ("context-tokens", self.prompt_tokens, 0),
            ("output-tokens", self.output_tokens, 1),
        ):
            if not (math.isfinite(value) and value >= low):
                raise InvalidParameter(name, value, f"a number from {low}")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidParameter("concurrency", self.concurrency, "a whole number from 1")

    @property
    def mean_context(self) -> float:
        """Cached tokens of a request half way through its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything the cost model needs beside batch, draft length and context.

    devices        all devices; devices / layout.devices replicas share the load
    constants      efficiencies: the family's prior, or calibrated ones
    utilisation    share of device memory the engine may use
    """

    shape: ModelShape
    hardware: Hardware
    load: Load
    precision: Precision = field(default_factory=Precision)
    layout: Layout = field(default_factory=Layout)
    devices: int = 1
    constants: Constants | None = None
    utilisation: float = 0.9

    def __post_init__(self) -> None:
        if self.devices < 1 or self.devices % self.layout.devices:
            raise InvalidParameter(
                "devices", self.devices, f"a multiple of the {self.layout.devices} devices of one replica"
            )
        if not 0 < self.utilisation <= 1:
            raise InvalidParameter("memory utilisation", self.utilisation, "a number above 0 and up to 1")
        if self.constants is None:
            object.__setattr__(self, "constants", prior_constants(self.hardware.family))

    @property
    def priced_by(self) -> Constants:
        assert self.constants is not None, "set in __post_init__"
        return self.constants

    @property
    def replicas(self) -> int:
        return self.devices // self.layout.devices


def with_constants(scenario: Scenario, constants: Constants) -> Scenario:
    """The same scenario priced by other constants."""
    return dataclasses.replace(scenario, constants=constants)
