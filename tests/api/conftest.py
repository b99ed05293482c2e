"""Fixtures of the API tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from mlxpaged.api import server as api_server
from tests.api.helpers import DEADLINE
from tests.scripted import scripted_server
from tests.support import RunningServer


@pytest.fixture(scope="session", autouse=True)
def _patient_compiler() -> Iterator[None]:
    """On a busy machine, grammars that arrive together wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_server, "COMPILE_SECONDS", DEADLINE)
        yield


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model, shared with other files; or, for a file with a SCRIPT, a model that writes what that says."""
    script = getattr(request.module, "SCRIPT", None)
    if script is None:
        yield request.getfixturevalue("demo_server")
    else:
        with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", script) as server:
            yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    """The official client of the file's server, which is idle and balanced after every test."""
    with server.client(timeout=DEADLINE) as client:
        yield client
    server.wait_idle(DEADLINE)
