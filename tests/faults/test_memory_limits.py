"""A real control group with less memory than a server is to take: it says so, and is not killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.process_memory import CGROUP_MEMORY

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has no control groups"),
]

SECONDS = 120.0


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new control group with 0.8 GB of memory. Version 2 comes first."""
    name = f"mlxpaged-test-{os.getpid()}"
    for root, limit, *_ in CGROUP_MEMORY:
        group = root / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(8 * 10**8))
                yield group
                time.sleep(0.5)  # until the kernel has removed the process
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_start_beyond_the_limit_of_a_control_group_says_so(cgroup: Path, tmp_path: Path) -> None:
    """The kernel grants memory beyond it, and kills the process when it is used."""
    join = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
    serve = (sys.executable, "-m", "mlxpaged", "serve", "--port", "0", "--kv-cache-memory", "1GB")
    ended = subprocess.run(
        [*join, *serve], capture_output=True, text=True, timeout=SECONDS, env=os.environ | {"HOME": str(tmp_path)}
    )
    assert ended.returncode == 1
    assert "--kv-cache-memory 1.0 GB, but only 0." in ended.stderr + ended.stdout
