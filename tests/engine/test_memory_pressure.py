"""What the system says about its memory: macOS by a number, Linux by a file, and its free pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.engine import memory_pressure as module
from mlxpaged.engine.memory_pressure import MemoryPressure, from_level, from_stalls, memory_pressure, sysctl_int
from mlxpaged.process_memory import free_in_vm_stat

NORMAL, WARNING, CRITICAL = MemoryPressure

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                5532.
Pages active:                            118032.
Pages inactive:                          116201.
Pages speculative:                         1123.
Pages throttled:                              0.
Pages wired down:                        113029.
Pages purgeable:                            840.
"Translation faults":                 411082219.
Pages copy-on-write:                    8839203.
File-backed pages:                        62011.
Anonymous pages:                         173345.
Pages stored in compressor:              402017.
Pages occupied by compressor:            140011.
"""
"""Of a Mac with 8 GB."""


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


def test_free_memory_of_a_mac_is_what_was_not_used_lately() -> None:
    assert free_in_vm_stat(VM_STAT) == 16384 * (5532 + 116201 + 1123)
    with pytest.raises(ValueError, match=r"not the output of vm_stat: 'vm_stat: error'"):
        free_in_vm_stat("vm_stat: error")
