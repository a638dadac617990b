"""`plan --probe`: a request whose model, machine, drafters and acceptance a probe fills in, fitted to its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.calibrated import calibrate_request
from paceline.plan.planner import PlanRequest
from paceline.plan.probe_file import ProbeFile, read_probe
from paceline.plan.probe_import import PREFIX, timings_of

__all__ = ["Filled", "request_with_probe"]


@dataclass(frozen=True, slots=True)
class Filled:
    """What the probe says where the command line says nothing.

    drafts   of the probe, as `--draft` names them
    """

    path: Path
    probe: ProbeFile
    model: str
    hardware: str

    @property
    def drafts(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.probe.drafters)

    def acceptance(self, draft: str) -> str:
        """Of a drafter the probe measured. Raises InvalidParameter for another."""
        return f"{PREFIX}{self.path}#{self.probe.drafter(draft).name}"

    def mechanism(self, draft: str) -> str:
        """The drafter as the planner knows it: a draft model by the configuration that the probe holds."""
        known = next((d for d in self.probe.drafters if d.name == draft), None)
        return f"model:{PREFIX}{self.path}#{draft}" if known is not None and known.config else draft


def request_with_probe(
    path: Path, model: str | None, hardware: str | None, request: Callable[[Filled], PlanRequest]
) -> PlanRequest:
    """The request that `request` makes of what the probe fills in, calibrated where the machine is the probe's."""
    probe = read_probe(path)
    own = f"{PREFIX}{path}"
    made = request(Filled(path, probe, model or own, hardware or own))
    if model is not None or hardware is not None:
        return made
    first = next((text for text, _ in made.drafts if text != "none"), None)
    drafter = None if first is None else _drafter(first, probe)
    fitted = calibrate_request(made, timings_of(path, drafter))
    return dataclasses.replace(made, calibration=fitted.calibration.as_json())


def _drafter(text: str, probe: ProbeFile) -> str | None:
    """The probe's name of a mechanism as the request writes it."""
    name = text.rpartition("#")[2] if "#" in text else text
    return next((d.name for d in probe.drafters if d.name == name), None)
