"""A results file that a run can be cut off from and go on with: JSON lines, the first one says what was run.

Every result is a line, written and flushed as soon as it is known. Opened again, what is there is read and
the rest is appended; a last line that was cut off is dropped. Raises UsageError where the file belongs to
another run, is no such file, or cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from paceline.errors import UsageError

__all__ = ["SCHEMA", "ResultFile"]

SCHEMA = "paceline.bench/1"


class ResultFile:
    """run    what was run: results under another one do not belong into this file
    rows   results so far, old ones first
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path, self.run = path, json.loads(json.dumps(dict(run)))
        self.rows: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read() if path.exists() else 0
            self._file = path.open("ab")
            self._file.truncate(whole)
        except OSError as error:
            raise UsageError(f"the results {path} cannot be written: {error.strerror}.") from error
        if whole == 0:
            self._write({"schema": SCHEMA, "run": self.run})

    def append(self, row: Mapping[str, Any]) -> None:
        self._write(row)
        self.rows.append(dict(row))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Takes the rows in; bytes up to the end of the last whole line."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if not lines:
            return 0
        header = self._parse(1, lines[0])
        if header.get("schema") != SCHEMA:
            raise UsageError(
                f"{self.path} has schema {header.get('schema')!r}, not {SCHEMA!r}; name another file."
            )
        self._check_run(header.get("run", {}))
        self.rows = [self._parse(number, line) for number, line in enumerate(lines[1:], start=2)]
        return whole

    def _check_run(self, found: Mapping[str, Any]) -> None:
        differing = [k for k in {**found, **self.run} if found.get(k) != self.run.get(k)]
        if differing:
            was = ", ".join(f"{k} {found.get(k)!r} there and {self.run.get(k)!r} now" for k in differing)
            raise UsageError(f"{self.path} holds another run ({was}); name another file or delete it.")

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{self.path} line {number} is not JSON; name another file.") from error
        if not isinstance(value, dict):
            raise UsageError(f"{self.path} line {number} is not a JSON object; name another file.")
        return value
