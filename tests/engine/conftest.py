"""The means to run Metal kernels: on a Mac for real, elsewhere on the CPU. Fixtures of several modules."""

import pytest

from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.parts.disk import disk_tier
from mlxpaged.parts.disk.disk_store import READ_RATE, DiskStore
from tests.metal_on_cpu.fixtures import metal, metal_on_cpu

__all__ = ["metal", "metal_on_cpu"]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step is launched before the one before it has ended, on every backend."""
    monkeypatch.setattr(ModelRunner, "overlaps", request.param)
    return bool(request.param)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler expects a millisecond for each token, on any machine, and the tier a fast disk, on any disk."""
    monkeypatch.setattr(PrefillLimits, "seconds_roughly", lambda _, start, tokens: tokens / 1000)
    monkeypatch.setattr(DiskStore, "read_rate", READ_RATE)
    monkeypatch.setattr(disk_tier, "PATIENCE_SECONDS", 600.0)
