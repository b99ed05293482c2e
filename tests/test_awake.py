"""A Mac stays awake while requests and batches run. The system is a fake one; the engine thread is real."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mlxpaged import awake, macos
from mlxpaged.api.batches import runner
from mlxpaged.api.batches.store import Store
from mlxpaged.awake import LINGER_SECONDS, WHY, Hold, StayAwake
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.engine.engine_thread import EngineThread
from mlxpaged.engine_config import EngineConfig
from tests.api.test_batches import CONFIG, ended, jsonl, submit
from tests.engine.test_memory import slot
from tests.support import running_server


class System:
    """Assertions are numbered. reasons: of those that hold it awake now."""

    def __init__(self, refuses: bool = False) -> None:
        self.reasons: dict[int, str] = {}
        self.num_held = 0
        self._refuses = refuses

    def hold(self, why: str) -> int | None:
        if self._refuses:
            return None
        self.num_held += 1
        self.reasons[self.num_held] = why
        return self.num_held

    def let(self, assertion: int) -> None:
        del self.reasons[assertion]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_machine_is_held_awake_once_while_anybody_holds_it() -> None:
    system = System()
    stays = StayAwake(system)
    with stays.held():
        assert list(system.reasons.values()) == [WHY]
        with stays.held():
            assert len(system.reasons) == 1
        assert len(system.reasons) == 1
    assert not system.reasons
    assert system.num_held == 1


def test_a_machine_that_may_sleep_is_not_held_and_the_choice_holds_at_once() -> None:
    system = System()
    stays = StayAwake(system)
    stays.choose(False)
    with stays.held():
        assert not system.reasons
        stays.choose(True)
        assert system.reasons
        stays.choose(False)
        assert not system.reasons


def test_a_system_that_refuses_is_no_error() -> None:
    stays = StayAwake(System(refuses=True))
    with stays.held(), stays.held():
        pass


def test_a_hold_ends_a_while_after_the_last_use() -> None:
    clock, system = Clock(), System()
    hold = Hold(StayAwake(system), clock)
    assert hold.pause() == float("inf")
    for clock.now in (0.0, LINGER_SECONDS - 1, 2 * LINGER_SECONDS - 2):
        hold.note_use()
    clock.now += LINGER_SECONDS - 1
    hold.rest()
    assert system.reasons
    assert hold.pause() == 1.0
    clock.now += 1
    hold.rest()
    assert not system.reasons
    assert system.num_held == 1
    hold.end()  # twice is no error
    hold.note_use()
    assert system.reasons


def test_the_engine_thread_holds_it_while_a_model_is_loaded_or_has_work_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system, clock = System(), Clock()
    thread = EngineThread(clock, awake=StayAwake(system))
    loading = slot(lambda _: thread.end(), EngineConfig(kv_cache_bytes=4_000_000))
    seen: dict[str, bool] = {}
    pending = [True]

    def note(name: str) -> None:
        seen[name] = seen.get(name, True) and bool(system.reasons)

    let, forward = system.let, ModelRunner.forward

    def letting(assertion: int) -> None:
        let(assertion)
        if pending:
            pending.clear()
            request = Request("a", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), 0.0)
            thread.submit(loading, [request])
        else:
            thread.end()

    def stepping(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
        note("step")
        return forward(self, *arguments, **options)

    def on_step(outputs: list[RequestOutput], stats: EngineStats) -> None:
        if any(output.finish_reason for output in outputs):
            clock.now += LINGER_SECONDS

    def on_ready(*_: object) -> None:
        note("load")
        clock.now += LINGER_SECONDS

    monkeypatch.setattr(system, "let", letting)
    monkeypatch.setattr(ModelRunner, "forward", stepping)
    loading.callbacks = dataclasses.replace(loading.callbacks, on_ready=on_ready, on_step=on_step)
    thread.load(loading)
    thread.run()
    assert seen == {"load": True, "step": True}
    assert not system.reasons
    assert system.num_held == 2, "once for the load, and once for the request"


def test_a_thread_that_ends_lets_the_machine_sleep() -> None:
    system = System()
    thread = EngineThread(Clock(), awake=StayAwake(system))
    loading = slot(lambda _: None, EngineConfig(kv_cache_bytes=4_000_000))
    loading.callbacks = dataclasses.replace(loading.callbacks, on_ready=lambda *_: thread.end())
    thread.load(loading)
    thread.run()
    assert system.num_held == 1
    assert not system.reasons


def test_a_batch_holds_it_from_its_start_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = System()
    stays = StayAwake(system)
    monkeypatch.setattr(runner, "AWAKE", stays)
    seen: dict[str, bool] = {}
    journal, save_batch = Store.journal, Store.save_batch

    def beginning(self: Store, batch_id: str) -> Any:
        seen["begins"] = bool(system.reasons)
        return journal(self, batch_id)

    def saving(self: Store, batch: Any, **fields: Any) -> None:
        seen[str(fields.get("status"))] = bool(system.reasons)
        save_batch(self, batch, **fields)

    monkeypatch.setattr(Store, "journal", beginning)
    monkeypatch.setattr(Store, "save_batch", saving)
    with running_server(CONFIG, data_dir=tmp_path / "data") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        batch = submit(client, jsonl([{"model": "demo", "prompt": "a", "max_tokens": 2}]))
        assert ended(client, batch).status == "completed"
    assert {each: seen[each] for each in ("begins", "in_progress", "completed")} == dict.fromkeys(
        ("begins", "in_progress", "completed"), True
    )
    assert not system.reasons


class Library:
    """A stand-in for a framework: it notes the calls."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls
        self.CFStringCreateWithCString = self._function(lambda _, text, encoding: text.decode())
        self.CFRelease = self._function(lambda text: None)
        self.CFNumberGetValue = self._function(lambda *_: True)
        self.IOPMAssertionCreateWithName = self._function(self._assert)
        self.IOPMAssertionRelease = self._function(lambda number: calls.append(("release", number.value)))
        self.IOPSGetTimeRemainingEstimate = self._function(lambda: -1.0)

    def _function(self, call: Any) -> Any:
        def function(*arguments: Any) -> Any:
            return call(*arguments)

        return function

    def _assert(self, kind: str, level: int, why: str, number: Any) -> int:
        self._calls.append(("assert", kind, level, why))
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint32))[0] = 7
        return 0


def test_the_assertion_is_one_against_idle_sleep_of_the_system_and_not_of_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(macos, "framework", lambda name: Library(calls))
    with StayAwake().held():
        assert calls == [("assert", "PreventUserIdleSystemSleep", 255, WHY)]
    assert calls[1:] == [("release", 7)]
    assert macos.on_battery() is True


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has them")
def test_elsewhere_the_system_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos, "framework", lambda name: pytest.fail(f"{name} is loaded"))
    with awake.AWAKE.held():
        pass
    said = macos.idle_seconds(), macos.on_battery(), macos.low_power(), macos.thermal_state()
    assert said == (None, None, None, None)


@pytest.mark.parametrize("error", [OSError("no such file"), AttributeError("no such symbol")])
def test_a_framework_that_cannot_be_used_says_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(macos, "framework", fail)
    with StayAwake().held():
        pass
    said = macos.idle_seconds(), macos.on_battery(), macos.low_power(), macos.thermal_state()
    assert said == (None, None, None, None)
