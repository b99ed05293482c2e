"""What a Mac keeps resident for the GPU, with MLX's rule of which allocations it wires."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.engine.builder import build_engine
from mlxpaged.engine.engine_thread import EngineThread
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.parts.memory.wired_memory import PAGE, choose_wiring, wire_memory
from tests.engine.test_memory import slot

HEAP = 2**20
SMALL = 256
"""Smaller buffers are in MLX's heap."""


class Residency:
    """As `ResidencySets` and `MetalAllocator` of MLX 0.32.2 wire allocations. changes: how often a set has changed."""

    def __init__(self, working_set: int = 2**34) -> None:
        self.working_set = working_set
        self.limit = self.active = self.changes = 0
        self.wired: dict[int, int] = {}
        self.tracked = {0: HEAP}
        self._ids = itertools.count(1)

    def allocate(self, size: int) -> int:
        buffer = next(self._ids)
        self.active += size
        if size >= SMALL:
            self.tracked[buffer] = -(-size // PAGE) * PAGE
            self._insert(buffer)
        return buffer

    def free(self, buffer: int, size: int) -> None:
        self.active -= size
        self.tracked.pop(buffer, None)
        if self.wired.pop(buffer, None) is not None:
            self.changes += 1

    def set_limit(self, limit: int) -> int:
        if limit > self.working_set:
            raise ValueError("larger than the maximum working set")
        before, self.limit = self.limit, limit
        order = list(self.tracked)
        random.Random(limit).shuffle(order)  # that of an unordered map
        for buffer in order:
            if sum(self.wired.values()) > limit:
                self.wired.pop(buffer, None)
            elif buffer not in self.wired:
                self._insert(buffer)
        return before

    def _insert(self, buffer: int) -> None:
        if sum(self.wired.values()) + self.tracked[buffer] <= self.limit:
            self.wired[buffer] = self.tracked[buffer]
            self.changes += 1


@pytest.fixture(autouse=True)
def _choice() -> Iterator[None]:
    yield
    choose_wiring("auto")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Residency:
    """A Mac with 32 GB. Only what the test allocates, and what fills the limit, is counted."""
    residency = Residency()

    class Filling:
        """An array, until it is freed."""

        def __init__(self, size: int) -> None:
            self._size, self._buffer = size, residency.allocate(size)

        def __del__(self) -> None:
            residency.free(self._buffer, self._size)

    info: dict[str, Any] = {"memory_size": 2**35, "max_recommended_working_set_size": residency.working_set}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: residency.active)
    monkeypatch.setattr(mx, "set_wired_limit", residency.set_limit)
    monkeypatch.setattr(mx, "zeros", lambda shape, dtype: Filling(shape[0]))
    monkeypatch.setattr(mx, "eval", lambda *arrays: None)
    return residency


@pytest.mark.parametrize("seed", range(5))
def test_all_that_is_constant_is_wired_and_no_array_of_a_step_changes_a_set(mac: Residency, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((64, 256, 5_120, 20_000, 3_000_000, 500_000_000)) for _ in range(rng.randrange(20, 400))]
    weights = {mac.allocate(min(size, 2**33 // len(sizes))) for size in sizes}
    allocated = mac.active
    for _ in range(2):  # the second time as after a load or a resize
        assert wire_memory() == allocated
        assert mac.wired.keys() >= weights & mac.tracked.keys()
        before = mac.changes
        for size in (PAGE, 40_000, 2_000_000, 300_000_000):
            mac.free(mac.allocate(size), size)
        assert mac.changes == before
        weights.add(mac.allocate(100_000_000))
        allocated += 100_000_000


def test_the_limit_is_never_above_the_working_set(mac: Residency) -> None:
    mac.allocate(mac.working_set - 3 * 2**20)
    assert wire_memory() > 0
    assert mac.limit == mac.working_set


def test_a_limit_that_mlx_refuses_is_logged(
    mac: Residency, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(limit: int) -> int:
        raise ValueError("larger than the maximum working set")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    assert wire_memory() == 0
    assert "the model's memory is not wired: larger than" in caplog.text


@pytest.mark.parametrize(
    ("choice", "memory", "is_wired"),
    [
        ("auto", 24 * 2**30, True),
        ("auto", 24 * 2**30 - 1, False),
        ("on", 2**34, True),
        ("off", 2**37, False),
    ],
)
def test_memory_is_wired_from_24_gb_on_or_as_the_flag_says(
    mac: Residency, choice: str, memory: int, is_wired: bool
) -> None:
    mac.allocate(50_000_000)
    mx.device_info()["memory_size"] = memory
    choose_wiring(choice)
    assert (wire_memory() > 0) == is_wired
    assert (mac.limit > 0) == is_wired


def test_without_metal_nothing_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    choose_wiring("on")
    assert wire_memory() == 0


def test_it_is_done_after_each_load_unload_and_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[str] = []
    engine_thread, executor = (f"mlxpaged.engine.{name}.wire_memory" for name in ("engine_thread", "executor"))
    monkeypatch.setattr("mlxpaged.engine.engine_thread.wires_memory", lambda: True)
    monkeypatch.setattr(engine_thread, lambda: wired.append("thread"))
    monkeypatch.setattr(executor, lambda: wired.append("resize"))
    thread = EngineThread()
    loading = slot(lambda _: None, EngineConfig(kv_cache_bytes=4_000_000))

    def on_ready(*_: object) -> None:
        thread.unload(loading)
        thread.end()

    loading.callbacks = dataclasses.replace(loading.callbacks, on_ready=on_ready)
    thread.load(loading)
    thread.run()
    assert wired == ["thread", "thread"]
    core = build_engine(EngineConfig(kv_cache_bytes=64_000_000), load_model("demo"))
    core.scheduler.blocks.size.ask(1)
    core.step()
    assert wired[2:] == ["resize"]
