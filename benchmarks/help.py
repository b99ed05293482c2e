"""Times `mlxpaged --help` and the help of each command beside the start of Python itself.

python benchmarks/help.py
"""

from __future__ import annotations

import subprocess
import sys
import time

from mlxpaged.cli import COMMANDS

RUNS = 10


def fastest(*args: str) -> float:
    """Seconds of the fastest of RUNS processes: the others waited for something else."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    python = fastest("-c", "pass")
    print(f"{'python -c pass':24} {1000 * python:6.0f} ms")
    for command in ("", *COMMANDS):
        seconds = fastest("-m", "mlxpaged", *command.split(), "--help")
        print(f"{f'mlxpaged {command} --help':24} {1000 * seconds:6.0f} ms, {seconds / python:4.1f} times")


if __name__ == "__main__":
    main()
