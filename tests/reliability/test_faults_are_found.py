"""Each test of a thread in docs/reliability.md fails if the fault of that thread is put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.faults import FAULTS, run_with, threads


def test_each_thread_has_a_fault_and_its_text_is_there() -> None:
    assert FAULTS.keys() == threads().keys()
    for fault in FAULTS.values():
        compile(fault.text(), fault.file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_back_is_found(name: str, tmp_path: Path) -> None:
    ended = run_with(FAULTS[name], threads()[name][1], tmp_path)
    print(ended.stdout[-1500:])
    assert ended.returncode == 1, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "FAILED" in ended.stdout
