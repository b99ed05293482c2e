"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mlxpaged  # noqa: F401  (first: it loads the fast BLAS before mlx is imported)
from mlxpaged.attention import tuner
from mlxpaged.cpu import streams
from mlxpaged.engine import EngineConfig
from tests.support import RunningServer, running_server


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_measured() -> Iterator[None]:
    """On a Mac neither: only tests of timings time, and none writes to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "can_measure", lambda: False)
        yield


@pytest.fixture
def many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work that can be split among CPU streams is split, however small it is and however few the cores are."""
    monkeypatch.setattr(streams, "HANDOFF", 1e-12)
    monkeypatch.setattr(streams, "cores", lambda: 3)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RunningServer]:
    """The demo model with the default settings, but a small pool."""
    with running_server(EngineConfig(kv_cache_bytes=64_000_000)) as server:
        yield server
