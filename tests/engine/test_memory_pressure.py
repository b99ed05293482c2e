"""What the system says about its memory: macOS by a number, Linux by a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.parts.memory import memory_pressure as module
from mlxpaged.parts.memory.memory_pressure import MemoryPressure, from_level, from_stalls, memory_pressure, sysctl_int

NORMAL, WARNING, CRITICAL = MemoryPressure


@pytest.mark.parametrize(
    ("level", "pressure"), [(None, NORMAL), (0, NORMAL), (1, NORMAL), (2, WARNING), (3, WARNING), (4, CRITICAL)]
)
def test_the_levels_of_macos_are_read(level: int | None, pressure: MemoryPressure) -> None:
    assert from_level(level) is pressure


@pytest.mark.parametrize(
    ("percent", "pressure"),
    [("0.00", NORMAL), ("9.99", NORMAL), ("10.00", WARNING), ("39.99", WARNING), ("40.00", CRITICAL)],
)
def test_the_stalls_of_linux_are_read(percent: str, pressure: MemoryPressure, tmp_path: Path) -> None:
    text = f"some avg10={percent} avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"
    assert from_stalls(text) is pressure


@pytest.mark.parametrize("text", ["", "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"])
def test_a_system_that_tells_nothing_is_not_short_of_memory(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PSI", tmp_path / "memory")
    assert memory_pressure() is NORMAL
    (tmp_path / "memory").write_text(text)
    assert memory_pressure() is NORMAL


def test_a_value_that_the_system_does_not_have_is_none() -> None:
    assert sysctl_int(b"no.such.value") is None
