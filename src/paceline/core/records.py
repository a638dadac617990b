"""The trace: one record for each sequence in each round, as JSON lines.

Written by the engine, read by the planner. The first line is a header with the schema version and what was run;
every other line is one `StepRecord`. A reader refuses a version it does not know and names the line it cannot
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from paceline.errors import ModelFormatError, UsageError

__all__ = ["SCHEMA", "StepRecord", "TraceWriter", "read_trace"]

SCHEMA = "paceline.trace/1"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One sequence in one round of the engine.

    request, choice   whose tokens
    round             the engine's round counter; records of one round share it
    time_s            seconds since the engine started, at the end of the round
    batch, rows       sequences and rows (tokens) in the target pass, all sequences together
    context           committed tokens of this sequence when the round began
    kind              "prefill", "plain" (no draft in this round) or "verify"
    drafter           who proposed; "none" where nobody did
    proposed          draft tokens on the longest path
    accepted          drafts kept and emitted
    emitted           tokens emitted: accepted plus the target's own (0 or 1); 0 in the middle of a prompt, and
                      where a block failed and is tried again without drafts
    confidence        the drafter's own acceptance estimates by position of a chain, where it has them
    tree_size         nodes of a proposal that branches; None for a chain
    verify, lossless  the acceptance rule, and whether the text keeps the target's distribution under it
    draft_s, verify_s, other_s   seconds of the whole round spent drafting, in the target pass, elsewhere
    """

    request: str
    choice: int
    round: int
    time_s: float
    batch: int
    rows: int
    context: int
    kind: str
    drafter: str
    proposed: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    other_s: float
    temperature: float = 0.0
    confidence: tuple[float, ...] | None = None
    tree_size: int | None = None
    verify: str = "coupled"
    lossless: bool = True


_FIELDS = tuple(f.name for f in fields(StepRecord))


class TraceWriter:
    """Appends records to a JSON-lines file; the header names the run."""

    def __init__(self, target: Path | IO[str], run: Mapping[str, Any]) -> None:
        self._owned = isinstance(target, Path)
        try:
            self._file: IO[str] = target.open("w", encoding="utf-8") if isinstance(target, Path) else target
        except OSError as error:
            raise UsageError(f"the trace {target} cannot be written: {error.strerror}") from error
        self._line({"schema": SCHEMA, "run": dict(run)})

    def write(self, record: StepRecord) -> None:
        self._line({name: getattr(record, name) for name in _FIELDS})

    def close(self) -> None:
        self._file.flush()
        if self._owned:
            self._file.close()

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> tuple[dict[str, Any], Iterator[StepRecord]]:
    """The header's `run` and an iterator over the records of a trace file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not UTF-8 text; give a trace written with --trace") from error
    header = _parse(path, 1, lines[0] if lines else "")
    if header.get("schema") != SCHEMA:
        raise ModelFormatError(f"{path} has schema {header.get('schema')!r}; this version reads {SCHEMA!r}")
    return header.get("run", {}), _records(path, lines[1:])


def _records(path: Path, lines: list[str]) -> Iterator[StepRecord]:
    known = set(_FIELDS)
    for number, line in enumerate(lines, start=2):
        value = _parse(path, number, line)
        if unknown := value.keys() - known:
            raise ModelFormatError(f"{path} line {number} has unknown fields {sorted(unknown)}")
        if value.get("confidence") is not None:
            value["confidence"] = tuple(value["confidence"])
        try:
            yield StepRecord(**value)
        except TypeError as error:
            raise ModelFormatError(f"{path} line {number} lacks a field: {error}") from error


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{path} line {number} is not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} line {number} is not a JSON object")
    return value
