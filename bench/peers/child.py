"""The parent's end of the protocol: one long-lived process an arm, asked one at a time, so that one alone computes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from paceline.errors import RequestFailed

__all__ = ["Child"]

CHILDREN = Path(__file__).parent / "children"
_THREADING = ("OMP_", "MKL_", "KMP_", "GOMP_")  # what the caller's shell says of threads is not for the measured


class Child:
    """A program of `children/` under an interpreter; `ask` sends a request and waits for its answer.

    Raises RequestFailed where the child answers with an error or ends.
    """

    def __init__(self, python: Path, program: str, name: str, threads: int, log: Path) -> None:
        self.name = name
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_THREADING)}
        self._log = log.open("ab")
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb")
        self._process = subprocess.Popen(
            [str(python), str(CHILDREN / program), str(writing)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writing],
            env=kept | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
        )
        os.close(writing)  # the child's alone, so that its end is seen

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RequestFailed(f"{self.name} ended with code {self._process.wait()}; its log is {self._log.name}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RequestFailed(f"{self.name}: {answer['error']}; its log is {self._log.name}.")
        return answer

    def close(self) -> None:
        """End of stdin ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
