"""What every export needs of a plan, and the shared bits of engine lore."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan.config import find_model, hub_id
from paceline.plan.document import Plan

__all__ = ["Advice", "Export", "Step", "advice_of", "command", "compact_json", "refuse", "version_notes"]


@dataclass(frozen=True, slots=True)
class Export:
    """Files by name, the command that starts the engine being one of them; and what to beware of."""

    files: Mapping[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Draft `length` for batches `first` to `last` of one replica."""

    first: int
    last: int
    length: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The plan reduced to what an engine can be told."""

    model: str
    kind: str
    draft: str | None
    steps: tuple[Step, ...]
    tensor: int
    expert: int
    replicas: int
    sequences: int
    dtype: str
    kv_dtype: str
    skip_layer: int | None
    on: bool
    block: int

    @property
    def longest(self) -> int:
        return max((s.length for s in self.steps), default=0)

    @property
    def varies(self) -> bool:
        return len({s.length for s in self.steps}) > 1

    def length_at(self, batch: int) -> int:
        for step in self.steps:
            if batch <= step.last:
                return step.length
        return self.steps[-1].length if self.steps else 0


def advice_of(plan: Plan) -> Advice:
    """The schedule of the load's own context band, with the drafter it is for."""
    r, s, best = plan["request"], plan["scenario"], plan["answer"]["best"]
    schedule = plan["schedule"]
    chosen = next(c for c in plan["candidates"] if c["mechanism"] == schedule["mechanism"])
    context = s["context_tokens"] + s["output_tokens"] / 2
    bands = schedule["bands"]
    band = next((b for b in bands if b["context_up_to"] is None or context <= b["context_up_to"]), None)
    steps = tuple(Step(e["first"], e["last"], e["length"]) for e in band["entries"]) if band else ()
    on = best["draft_length"] > 0 and any(step.length for step in steps)
    layers = None
    if chosen["kind"] == "layer-skip":
        layers = max(1, round(find_model(r["model"]).layers * 0.5))
    return Advice(
        model=hub_id(r["model"]),
        kind=chosen["kind"] if on else "none",
        draft=hub_id(chosen["name"]) if chosen["name"] else None,
        steps=steps if on else (),
        tensor=s["tp"],
        expert=s["ep"],
        replicas=s["replicas"],
        sequences=r["concurrency"] or best["batch"],
        dtype=s["linear"],
        kv_dtype=s["kv"],
        skip_layer=layers,
        on=on,
        block=chosen["longest"],
    )


def command(parts: Sequence[str]) -> str:
    """A shell command, one long option a line."""
    lines = [shlex.quote(parts[0])]
    for part in parts[1:]:
        if part.startswith("--"):
            lines.append(shlex.quote(part))
        else:
            lines[-1] += " " + shlex.quote(part)
    return " \\\n  ".join(lines) + "\n"


def compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def refuse(engine: str, kind: str, reason: str) -> Infeasible:
    return Infeasible(f"{engine} cannot draft with {kind}: {reason}")


def version_notes(
    engine: str, version: str | None, known: str, traps: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Warnings for a version: that it is not the one looked at, and the traps of versions below a bound."""
    if version is None:
        return []
    numbers = _numbers(version)
    found = [text for bound, text in traps if numbers < _numbers(bound)]
    if numbers != _numbers(known):
        found.append(f"option names were read from {engine} {known}; {version} may differ: check its --help.")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    if not re.match(r"^v?b?\d+(\.\d+)*", version):
        raise InvalidParameter("engine version", version, "a version number such as 0.33.0")
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
