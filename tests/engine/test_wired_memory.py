"""What an idle Mac keeps resident for the GPU, with MLX's rule of which allocations it wires."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged import mlx_settings
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine.engine_thread import EngineThread
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.parts.memory import wired_memory
from mlxpaged.parts.memory.wired_memory import (
    WIRE_AFTER_SECONDS,
    IdleWiring,
    choose_wiring,
    unwire_memory,
    wire_memory,
)
from tests.engine.test_memory import slot

PAGE = 2**14
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

    def set_limit(self, limit: int) -> int:
        if limit > self.working_set:
            raise ValueError("larger than the maximum working set")
        before, self.limit = self.limit, limit
        order = list(self.tracked)
        random.Random(limit).shuffle(order)  # that of an unordered map
        for buffer in order:
            if sum(self.wired.values()) > limit:
                self.changes += self.wired.pop(buffer, None) is not None
            elif buffer not in self.wired:
                self._insert(buffer)
        return before

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

    def _insert(self, buffer: int) -> None:
        if sum(self.wired.values()) + self.tracked[buffer] <= self.limit:
            self.wired[buffer] = self.tracked[buffer]
            self.changes += 1


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: 0)
    unwire_memory()
    choose_wiring("auto")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Residency:
    """A Mac with 32 GB. Only what the test allocates is counted."""
    residency = Residency()
    info: dict[str, Any] = {"memory_size": 2**35, "max_recommended_working_set_size": residency.working_set}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: residency.active)
    monkeypatch.setattr(mx, "set_wired_limit", residency.set_limit)
    monkeypatch.setenv(mlx_settings.REFRESH, "500")
    return residency


@pytest.mark.parametrize("seed", range(5))
def test_all_is_wired_while_no_request_runs_and_no_array_of_a_request_enters_a_set(mac: Residency, seed: int) -> None:
    """Neither those of its steps, nor pools that grow, nor states that are freed by other requests."""
    rng = random.Random(seed)
    sizes = [rng.choice((64, 256, 5_120, 20_000, 3_000_000, 500_000_000)) for _ in range(rng.randrange(20, 400))]
    held = {mac.allocate(size := min(each, 2**33 // len(sizes))): size for each in sizes}
    choose_wiring("on")
    clock = Clock()
    wiring = IdleWiring(clock)
    for _ in range(3):
        clock.now += WIRE_AFTER_SECONDS
        wiring.rest()
        assert mac.wired.keys() >= held.keys() & mac.tracked.keys()
        wiring.note_use()
        assert not mac.wired
        before = mac.changes
        for size in (PAGE, 40_000, 2_000_000, 300_000_000):  # of steps
            mac.free(mac.allocate(size), size)
        for buffer in rng.sample(sorted(held), 5):  # pools that grow
            size = held.pop(buffer)
            mac.free(buffer, size)
            held[mac.allocate(2 * size)] = 2 * size
        wiring.note_use()
        assert mac.changes == before


def test_memory_is_wired_once_after_a_time_without_requests(mac: Residency) -> None:
    mac.allocate(50_000_000)
    choose_wiring("on")
    clock = Clock()
    wiring = IdleWiring(clock)
    assert wiring.pause() == WIRE_AFTER_SECONDS
    clock.now = WIRE_AFTER_SECONDS - 1
    wiring.rest()
    assert (mac.limit, wiring.pause()) == (0, 1.0)
    wiring.note_use()  # a request: the time begins again
    clock.now += WIRE_AFTER_SECONDS - 1
    wiring.rest()
    assert mac.limit == 0
    clock.now += 1
    wiring.rest()
    assert mac.limit > 50_000_000
    assert wiring.pause() == math.inf
    changes = mac.changes
    clock.now += 1_000
    wiring.rest()
    assert mac.changes == changes


def test_the_limit_is_never_above_the_working_set(mac: Residency) -> None:
    choose_wiring("on")
    mac.allocate(mac.working_set - 3 * 2**20)
    assert wire_memory() > 0
    assert mac.limit == mac.working_set


def test_a_limit_that_mlx_refuses_is_logged_once(
    mac: Residency, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(limit: int) -> int:
        raise ValueError("larger than the maximum working set")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    choose_wiring("on")
    clock = Clock()
    wiring = IdleWiring(clock)
    for _ in range(3):
        clock.now += WIRE_AFTER_SECONDS
        wiring.rest()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        "the model's memory is not wired: larger than the maximum working set"
    ]


@pytest.mark.parametrize("choice", ["auto", "off"])
@pytest.mark.parametrize("memory", [2**34, 2**37])
def test_mlx_is_never_asked_for_a_limit_unless_the_flag_says_on(
    mac: Residency, monkeypatch: pytest.MonkeyPatch, choice: str, memory: int
) -> None:
    """Also not for a limit of 0: only Macs whose server never set it are known to be safe."""
    mx.device_info()["memory_size"] = memory
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail(f"the limit is set to {limit}"))
    mac.allocate(50_000_000)
    choose_wiring(choice)
    clock = Clock()
    wiring = IdleWiring(clock)
    clock.now = 1_000
    wiring.rest()
    wiring.note_use()
    unwire_memory()
    assert (wire_memory(), wiring.pause()) == (0, math.inf)


def test_without_metal_nothing_is_wired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    choose_wiring("on")
    assert wire_memory() == 0


@pytest.mark.parametrize(("interval", "warns"), [(None, True), ("0", True), ("500", False)])
def test_memory_that_macos_lets_go_of_at_once_is_said(
    mac: Residency, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interval: str | None, warns: bool
) -> None:
    if interval is None:
        monkeypatch.delenv(mlx_settings.REFRESH)
    else:
        monkeypatch.setenv(mlx_settings.REFRESH, interval)
    choose_wiring("on")
    assert ("lets go of it after a second" in caplog.text) == warns


def request_of(length: int, now: float) -> Request:
    prompt = [1 + index % 200 for index in range(length)]
    return Request(str(length), prompt, SamplingParams(max_tokens=2, temperature=0.0), now)


def test_the_engine_thread_wires_between_requests_and_never_while_one_runs_or_a_pool_is_resized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    own = threading.get_ident()  # engines of other tests may still run, and they would wire too
    clock = Clock()
    thread = EngineThread(clock)
    config = EngineConfig(kv_cache_bytes=64_000_000, wired_memory="on")
    loading = slot(lambda _: thread.end(), config)
    requests = iter([40, 3_900])  # the second one needs larger pools

    def set_limit(limit: int) -> int:
        if threading.get_ident() != own:
            return 0
        events.append("wire" if limit else "unwire")
        if limit and (length := next(requests, None)) is not None:
            thread.submit(loading, [request_of(length, clock.now)])
        elif limit:
            thread.end()
        return 0

    def on_step(outputs: list[RequestOutput], stats: EngineStats) -> None:
        if any(output.finish_reason for output in outputs):
            clock.now += WIRE_AFTER_SECONDS

    def noting(kind: type, name: str) -> None:
        call = getattr(kind, name)

        def noted(self: Any, *arguments: Any) -> Any:
            if threading.get_ident() == own:
                events.append(name)
            return call(self, *arguments)

        monkeypatch.setattr(kind, name, noted)

    def begin() -> None:
        clock.now += WIRE_AFTER_SECONDS
        events.clear()  # those of the load

    monkeypatch.setattr(wired_memory, "wires_memory", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 2**40})
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    noting(ModelRunner, "forward")
    noting(LayerKVCache, "resize")

    def on_ready(*_: object) -> None:
        thread.commands.put(begin)

    loading.callbacks = dataclasses.replace(loading.callbacks, on_ready=on_ready, on_step=on_step)
    thread.load(loading)
    thread.run()
    phases = "".join({"wire": "w", "unwire": "u", "forward": "f", "resize": "r"}[each] for each in events)
    first, second, third = phases.replace("wu", "w|u").split("|")
    assert first == "w"
    assert second.lstrip("uf") == "w", "the first request is computed unwired"
    assert third[0] == "u"
    assert third[-1] == "w"
    assert set(third[1:-1]) == {"f", "r"}, "the pools of the second one grow unwired"


def test_a_model_that_is_unloaded_or_resized_while_idle_is_unwired_before(monkeypatch: pytest.MonkeyPatch) -> None:
    wired = [True]
    monkeypatch.setattr("mlxpaged.engine.executor.unwire_memory", lambda: wired.__setitem__(0, False))
    core = build_engine(EngineConfig(kv_cache_bytes=64_000_000), load_model("demo"))
    resize = LayerKVCache.resize

    def checked(self: LayerKVCache, num_blocks: int) -> None:
        assert not wired[0]
        resize(self, num_blocks)

    monkeypatch.setattr(LayerKVCache, "resize", checked)
    core.scheduler.blocks.size.ask(1)
    core.step()
    assert not wired[0]
    wired[0] = True
    core.runner.rebuild_pools()
    assert not wired[0]
    core.close()
