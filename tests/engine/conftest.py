"""Fixtures of the engine tests; toys of the other parts are imported from their folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS, _TESTS / "verify", _TESTS / "drafters", _TESTS / "engine"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))


@pytest.fixture
def lab() -> Iterator[object]:
    """Engines of one test; the books of each are checked when the test ends."""
    from toy import Lab

    lab = Lab()
    yield lab
    lab.close()
