"""What the doctor says of a Mac's power and cooling. The Mac is a fake one."""

from __future__ import annotations

import sys

import pytest

from mlxpaged import macos
from mlxpaged.cli.doctor import machine

PLUGGED = """System-wide power settings:
Currently in use:
 standby              1
 powermode            2
 lowpowermode         0
"""


@pytest.mark.parametrize(
    ("settings", "is_low", "mode"),
    [
        (PLUGGED, False, "high power"),
        (" powermode 1\n", None, "low power"),
        (" powermode 0\n", False, "automatic"),
        (" lowpowermode         1\n", None, "low power"),
        (" lowpowermode 0\n", True, "automatic"),
        ("", True, "low power"),
        ("", False, "automatic"),
        ("", None, None),
    ],
)
def test_the_power_mode_is_that_of_pmset_or_of_the_system(settings: str, is_low: bool | None, mode: str | None) -> None:
    assert machine.power_mode(settings, is_low) == mode


@pytest.mark.parametrize(
    ("battery", "thermal", "said"),
    [
        (False, 0, [("power mode", "high power, plugged in"), ("thermal state", "nominal")]),
        (True, 2, [("power mode", "high power, on battery"), ("thermal state", "serious: macOS slows the chip down")]),
        (None, None, [("power mode", "high power, plugged in")]),
        (False, 7, [("power mode", "high power, plugged in"), ("thermal state", "7")]),
    ],
)
def test_the_doctor_says_what_makes_a_mac_slower(
    battery: bool | None, thermal: int | None, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "settings", lambda: PLUGGED)
    monkeypatch.setattr(macos, "on_battery", lambda: battery)
    monkeypatch.setattr(macos, "thermal_state", lambda: thermal)
    assert machine.power() == said
    described = dict(machine.machine())
    assert {"system", *dict(said)} <= described.keys()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac says it")
def test_elsewhere_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: pytest.fail("a command is run"))
    assert machine.power() == []


def test_a_mac_without_pmset_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine, "PMSET", ["/no/such/pmset"])
    assert machine.settings() == ""
