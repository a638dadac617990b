"""A probe as the planner's input: the model's shape, this machine as a device, acceptance, and timings to fit.

`probe:FILE` stands for a model or a device wherever a name of one is taken, `probe:FILE#DRAFTER` for a draft model or
an acceptance. The device's rates are what the probe's passes come to: bandwidth is the weights over the time of one
row, FLOP/s are those of the quickest pass for its rows. They are this model's, not the data sheet's; the calibration
that `plan --probe` makes of the passes corrects what is left.

Refused: a probe in another format than bfloat16 (the planner has none for it), drafters it has not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.core.estimate import Origin
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.acceptance import Acceptance, acceptance_from_lengths
from paceline.plan.config import shape_from_config
from paceline.plan.control.records import MATCHERS
from paceline.plan.hardware import Hardware
from paceline.plan.hindsight import fixed_rounds
from paceline.plan.probe_file import ProbeFile, ReplayedText, read_probe
from paceline.plan.shape import ModelShape
from paceline.plan.timings import Timing

__all__ = ["PREFIX", "acceptance_of", "hardware_of", "shape_of", "timings_of"]

PREFIX = "probe:"
_DRAWS = 100


def _probe(path: str) -> ProbeFile:
    probe = read_probe(Path(path))
    if probe.dtype != "bfloat16":
        raise UsageError(f"{path} was measured in {probe.dtype}; plans take probes in bfloat16")
    return probe


def _parts(text: str) -> tuple[ProbeFile, str]:
    path, _, drafter = text.removeprefix(PREFIX).partition("#")
    return _probe(path), drafter


def shape_of(text: str) -> ModelShape:
    """The target of `probe:FILE`, or the draft model of `probe:FILE#DRAFTER`."""
    probe, drafter = _parts(text)
    if not drafter:
        return shape_from_config(Path(probe.model).name, probe.config, "the probe's own configuration")
    config = probe.drafter(drafter).config
    if not config:
        raise InvalidParameter("draft", drafter, "a draft model whose configuration the probe holds")
    return shape_from_config(Path(drafter).name, config, "the probe's own configuration")


def hardware_of(text: str) -> Hardware:
    """The machine of `probe:FILE`."""
    probe, _ = _parts(text)
    one = min((p for p in probe.passes if p.rows == 1), key=lambda p: p.context)
    parameters = shape_from_config("target", probe.config, "").active_parameters
    fastest = max(p.rows / p.median_s for p in (*probe.passes, *probe.prefill))
    return Hardware(
        name=text,
        title=f"{probe.processor}, {probe.threads} threads",
        family="cpu" if probe.device == "cpu" else "hbm",
        flops_per_s={"bf16": 2 * parameters * fastest},
        bandwidth_bytes_per_s=probe.weight_bytes / one.median_s,
        memory_bytes=probe.memory_bytes,
        link_bytes_per_s=None,
        devices_per_node=1,
        source="measured by paceline probe",
    )


def acceptance_of(text: str) -> Acceptance:
    """Of `probe:FILE#DRAFTER`: tokens a round at each draft length, by rounds of the replay; its lowest temperature."""
    probe, drafter = _parts(text)
    probe.drafter(drafter)
    known = [t for t in probe.texts if drafter in t.drafts and t.tokens > 1]
    if not known:
        raise UsageError(f"the probe holds no text along which {drafter} was replayed")
    temperature = min(t.temperature for t in known)
    texts = [t for t in known if t.temperature == temperature]
    lengths = range(1, probe.longest + 1)
    counts = np.array([[_rounds(t, drafter, d) for d in lengths] for t in texts], dtype=float)
    tokens = np.array([t.tokens - 1 for t in texts], dtype=float)
    picks = np.random.default_rng(0).multinomial(len(texts), [1 / len(texts)] * len(texts), size=_DRAWS)
    draws = [(pick @ tokens) / (pick @ counts) for pick in picks]
    made = _curve(tokens.sum() / counts.sum(axis=0), f"{len(texts)} texts of the probe")
    return dataclasses.replace(
        made,
        draws=tuple(_curve(draw, "").conditional for draw in draws),
        temperature=temperature,
        all_rounds=drafter.partition(":")[0] in MATCHERS,
    )


def _curve(lengths: Sequence[float] | np.ndarray, source: str) -> Acceptance:
    capped = [min(float(v), 1.0 + d) for d, v in enumerate(lengths, start=1)]
    return acceptance_from_lengths(capped, source, Origin.MEASURED)


def _rounds(text: ReplayedText, drafter: str, length: int) -> int:
    return len(fixed_rounds(text, drafter, length))


def timings_of(path: Path, drafter: str | None) -> list[Timing]:
    """Rounds to fit the cost model to: plain passes, and passes of a verify block with the drafter's steps."""
    probe = _probe(str(path))
    steps = {} if drafter is None else {p.batch: p.median_s for p in probe.drafter(drafter).steps}
    found = []
    for p in probe.passes:
        if p.width > 1 and (drafter is None or (steps and p.batch not in steps)):
            continue
        draft_s = (p.width - 1) * steps.get(p.batch, 0.0)
        found.append(
            Timing(float(p.batch), p.width - 1, round_s=p.median_s + draft_s, context=float(p.context),
                   acceptance_length=1.0 if p.width > 1 else None)
        )  # fmt: skip
    return found
