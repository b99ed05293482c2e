"""Random JSON schemas around the limits end neither the process that compiles them nor the child that tries them first.
`make test-fuzz DEEP=100000 SEED=7 ARGS='-k random_schemas'` compiles so many of them, 1,000 in a process; FIRST is the
number of the first one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.schemas import KINDS
from tests.fuzz.test_fuzz import FIRST, SEED

ROOT = Path(__file__).parents[2]
SAMPLE = 20
SCHEMAS = int(os.environ.get("MLXPAGED_FUZZ_DEEP", "2000"))
"""Each is compiled twice, and takes up to a second."""
IN_A_PROCESS = 1_000
LONGEST = 3_600.0
"""Seconds for a process, on cores that do other work too. Each schema has limits of its own."""


def check(first: int, count: int) -> dict[str, int]:
    """The counts of the schemas with these numbers, by kind and result."""
    command = [sys.executable, "-m", "tests.fuzz.schemas", str(SEED), str(first), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert done.returncode == 0, f"schemas {first} to {first + count - 1} of seed {SEED}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout.splitlines()[-1])
    print(first, report, flush=True)
    assert report["deadly"] == []
    assert sum(report["counts"].values()) == count
    return dict(report["counts"])


def test_a_sample_of_random_schemas_is_compiled_or_refused() -> None:
    counts = check(0, SAMPLE)
    assert {name.split(", ")[0] for name in counts} == set(KINDS)
    assert {name.split(", ")[1] for name in counts} == {"compiled", "refused"}


@pytest.mark.slow
def test_many_random_schemas_are_compiled_or_refused() -> None:
    for first in range(FIRST, FIRST + SCHEMAS, IN_A_PROCESS):
        check(first, min(IN_A_PROCESS, FIRST + SCHEMAS - first))
