"""Which BLAS is in use, and whether what is said of it is so. Each case is a process of its own."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import pytest

from mlxpaged.blas import OPENBLAS, REFERENCE, SLEEP_AT_ONCE

WITH_ROUTINES = r"OpenBLAS \(\w+\)"
"""Such as Haswell."""


def openblas_is_installed() -> bool:
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not openblas_is_installed(), reason="needs OpenBLAS, on Linux")


def described(*imports: str, preload: str = "") -> str:
    code = "\n".join([*imports, "from mlxpaged import blas", "print(blas.describe())"])
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    variables |= {"LD_PRELOAD": preload} if preload else {}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_openblas_is_loaded_where_it_is_installed() -> None:
    assert re.fullmatch(WITH_ROUTINES, described())
    assert re.fullmatch(WITH_ROUTINES, described("import mlxpaged", "import mlx.core"))


def test_where_mlx_came_first_nobody_is_told_to_install_what_is_there() -> None:
    assert described("import mlx.core").startswith(f"{REFERENCE}; mlx was imported before mlxpaged")


def test_what_was_loaded_before_both_is_in_use() -> None:
    assert re.fullmatch(WITH_ROUTINES, described("import mlx.core", preload=OPENBLAS))


@pytest.mark.parametrize(("given", "expected"), [(None, "10"), ("26", "26")])
def test_its_threads_sleep_at_once_unless_told_otherwise(given: str | None, expected: str) -> None:
    """A thread that waits awake yields some hundred thousand times a second: 20 ms a product, by default."""
    variables = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", SLEEP_AT_ONCE[0])}
    variables |= {SLEEP_AT_ONCE[0]: given} if given else {}
    code = "import mlxpaged, os; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
