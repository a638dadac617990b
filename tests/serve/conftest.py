"""A server for the whole session, with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import Running, serving
from tiny_models import save_folder, tiny_backend, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("serve") / "m"
    return str(save_folder(path, tiny_model(max_position_embeddings=1024), tiny_backend()))


@pytest.fixture(scope="session")
def server(folder: str) -> Iterator[Running]:
    with serving(folder) as running:
        yield running


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing runs and nothing is held."""
    yield
    if "server" in request.fixturenames:
        running: Running = request.getfixturevalue("server")
        running.wait_idle()
        running.engine.check()
