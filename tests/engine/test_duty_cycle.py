"""The GPU is left to the person who uses the Mac. Sensors and time are fake ones; the engine is real."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from mlxpaged import macos
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.engine import parts
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.owner import duty_cycle, sensors
from mlxpaged.parts.owner.duty_cycle import LONGEST_PAUSE, DutyCycle, pause_after, reason_of
from mlxpaged.parts.owner.sensors import MacSensors, Readings, Thermal, sensors_here
from tests.engine.llama import make_core, served
from tests.support import run_requests

__all__ = ["served"]

AWAY = Readings(idle_seconds=600.0)
USED = Readings(idle_seconds=3.0)


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        (AWAY, None),
        (Readings(), None),
        (USED, "this Mac is in use"),
        (AWAY._replace(on_battery=True), "this Mac runs on battery"),
        (AWAY._replace(low_power=True), "this Mac is in low power mode"),
        (AWAY._replace(thermal=Thermal.FAIR), None),
        (AWAY._replace(thermal=Thermal.SERIOUS), "this Mac is hot"),
        (AWAY._replace(thermal=Thermal.CRITICAL), "this Mac is hot"),
    ],
)
def test_the_gpu_is_left_to_a_person_and_to_a_mac_that_is_short_of_power(readings: Readings, reason: str) -> None:
    assert reason_of(readings) == reason


@pytest.mark.parametrize(
    ("seconds", "share", "pause"),
    [(0.02, 0.5, 0.02), (0.02, 0.25, 0.06), (0.3, 0.75, 0.1), (5.0, 0.5, LONGEST_PAUSE), (0.02, 1.0, 0.0)],
)
def test_a_pause_is_as_long_as_the_share_asks_and_under_a_second(seconds: float, share: float, pause: float) -> None:
    assert pause_after(seconds, share) == pytest.approx(pause)
    assert LONGEST_PAUSE < 1


class Machine:
    """Time passes in steps, STEP seconds each, and in pauses. events: "launch", "read" and the seconds of pauses."""

    STEP = 0.04

    def __init__(self, monkeypatch: pytest.MonkeyPatch, readings: Readings) -> None:
        self.now = 0.0
        self.readings = readings
        self.num_read = 0
        self.events: list[Any] = []
        forward, read = ModelRunner.forward, InFlightStep.read

        def launching(runner: ModelRunner, *arguments: Any) -> Any:
            self.events.append("launch")
            return forward(runner, *arguments)

        def reading(step: InFlightStep) -> Any:
            self.events.append("read")
            self.now += self.STEP
            return read(step)

        monkeypatch.setattr(ModelRunner, "forward", launching)
        monkeypatch.setattr(InFlightStep, "read", reading)
        monkeypatch.setattr(parts, "sensors_here", lambda: self)
        monkeypatch.setattr(
            parts, "DutyCycle", lambda share, found, clock: DutyCycle(share, found, lambda: self.now, self.sleep)
        )

    def read(self) -> Readings:
        self.num_read += 1
        return self.readings

    def sleep(self, seconds: float) -> None:
        self.events.append(round(seconds, 6))
        self.now += seconds


@pytest.mark.usefixtures("overlaps")
def test_steps_of_a_used_machine_do_not_overlap_and_have_pauses_between_them(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    expected = run_requests(make_core(served), prompts, max_tokens=4)
    machine = Machine(monkeypatch, USED)
    core = make_core(served, duty_cycle=0.25)
    assert run_requests(core, prompts, max_tokens=4) == expected
    once = ["launch", "read", 0.12]
    assert machine.events[:9] == once * 3
    assert machine.events.count("launch") == machine.events.count("read") >= 4


def test_steps_of_an_idle_machine_overlap_without_pauses(
    served: ServedModel, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, AWAY)
    core = make_core(served, duty_cycle=0.25)
    run_requests(core, [[5, 6, 7]], max_tokens=4)
    assert {each for each in machine.events if not isinstance(each, str)} == set()
    assert machine.events[:3] == (["launch", "launch", "read"] if overlaps else ["launch", "read", "launch"])


def test_the_sensors_are_read_once_a_second_and_what_they_say_holds_from_then_on(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", duty_cycle.__name__)
    machine = Machine(monkeypatch, AWAY)
    core = make_core(served, duty_cycle=0.5)
    run_requests(core, [[5, 6, 7]], max_tokens=10)
    assert machine.num_read == 1, "0.4 s have passed"
    machine.now += 1.0
    machine.readings = USED
    run_requests(core, [[5, 6, 7]], max_tokens=4)
    assert 0.04 in machine.events
    machine.now += 1.0
    machine.readings, machine.events = AWAY, []
    run_requests(core, [[5, 6, 7]], max_tokens=4)
    assert 0.04 not in machine.events
    assert machine.num_read == 3
    assert [each.getMessage() for each in caplog.records] == [
        "this Mac is in use: the GPU computes for 50 % of the time",
        "steps follow each other without pauses again",
    ]


def test_time_that_has_passed_since_the_step_counts_as_pause(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, USED)
    core = make_core(served, duty_cycle=0.5)
    run_requests(core, [[5, 6, 7]], max_tokens=2)
    machine.events = []
    machine.now += 0.5  # no request has run
    run_requests(core, [[5, 6, 7]], max_tokens=2)
    assert machine.events[0] == "launch"


def test_by_default_there_is_no_such_part(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "sensors_here", lambda: pytest.fail("the sensors are read"))
    assert make_core(served).part(DutyCycle) is None


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has sensors")
def test_elsewhere_than_on_a_mac_the_flag_has_no_effect_and_says_so(
    served: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert sensors_here() is None
    assert make_core(served, duty_cycle=0.5).part(DutyCycle) is None
    assert "--duty-cycle has no effect here" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.05, 1.5, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"duty_cycle must be 0\.1 to 1"):
        EngineConfig(duty_cycle=share)


@pytest.mark.parametrize(
    ("said", "readings"),
    [
        ((2.5, True, False, 2), Readings(2.5, True, False, Thermal.SERIOUS)),
        ((None, None, None, None), Readings()),
        ((90.0, False, True, 9), Readings(90.0, False, True, Thermal.CRITICAL)),
    ],
)
def test_what_macos_does_not_know_reads_as_a_machine_that_is_not_used(
    said: tuple[Any, ...], readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(("idle_seconds", "on_battery", "low_power", "thermal_state"), said, strict=True):
        monkeypatch.setattr(macos, name, lambda value=value: value)
    assert MacSensors().read() == readings
    monkeypatch.setattr(sensors.sys, "platform", "darwin")
    assert isinstance(sensors_here(), MacSensors)
