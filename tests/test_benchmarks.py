"""The benchmarks run and print figures; what the figures are is for the reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(name: str, *args: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_the_benchmark_of_the_scheduler_measures() -> None:
    output = run("scheduler.py", "--sequences", "20", "--blocks", "20000", "--steps", "2", "--minutes", "0.5")
    costs, fairness = output.split("\n\n")
    rows = costs.splitlines()[1:]
    assert len(rows) >= 30
    assert all(float(row.split()[-1]) > 0 for row in rows)
    assert [row.split()[:2] for row in fairness.splitlines()[2:5]] == [
        ["0.5", "HIGH"],
        ["0.5", "NORMAL"],
        ["0.5", "LOW"],
    ]


def test_the_benchmark_of_the_engine_measures() -> None:
    output = run("engine.py", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--runs", "1")
    batch, ours, theirs, *_ = output.splitlines()[-1].split()
    assert batch == "2"
    assert float(ours) > 0
    assert float(theirs) > 0
