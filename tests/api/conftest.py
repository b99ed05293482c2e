"""Fixtures of the API tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.api.helpers import DEADLINE
from tests.support import RunningServer


@pytest.fixture
def client(demo_server: RunningServer) -> Iterator[OpenAI]:
    """The official client of the shared server; the server is idle and balanced after every test."""
    with demo_server.client(timeout=DEADLINE) as client:
        yield client
    demo_server.wait_idle(DEADLINE)
