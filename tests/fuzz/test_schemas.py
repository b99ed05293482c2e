"""Random JSON schemas around the limits end neither the process that compiles them nor the child that tries them first.
`make test-fuzz CASES=100000 SEED=7` compiles 10,000 of them, 1,000 in a process; FIRST is the number of the first
one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.test_fuzz import CASES, FIRST, SEED

ROOT = Path(__file__).parents[2]
SAMPLE = 20
SCHEMAS = max(1, CASES // 10)
"""Each is compiled twice, and takes up to a second."""
IN_A_PROCESS = 1_000
LONGEST = 3_600.0
"""Seconds for a process, on cores that do other work too. Each schema has limits of its own."""


def check(first: int, count: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.fuzz.schemas", str(SEED), str(first), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert done.returncode == 0, f"schemas {first} to {first + count - 1} of seed {SEED}: {done.stderr[-2000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts.pop("deadly") == []
    assert sum(counts.values()) == count
    return dict(counts)


def test_a_sample_of_random_schemas_is_compiled_or_refused() -> None:
    assert set(check(0, SAMPLE)) == {"compiled", "refused"}


@pytest.mark.slow
def test_many_random_schemas_are_compiled_or_refused() -> None:
    for first in range(FIRST, FIRST + SCHEMAS, IN_A_PROCESS):
        print(first, check(first, min(IN_A_PROCESS, FIRST + SCHEMAS - first)), flush=True)
