"""Toys of the other parts are imported from their folders; tiny products run on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS, _TESTS / "engine", _TESTS / "plan"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
