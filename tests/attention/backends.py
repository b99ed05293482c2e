"""The backends of MLX's own operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.attention import scenes

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="this backend is for a CPU")


@pytest.fixture(autouse=True, params=["gather", pytest.param("cpu", marks=on_cpu)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of a file that imports this runs on both, so that both are held to one reference."""
    monkeypatch.setattr(scenes, "backend", request.param)
    return str(request.param)
