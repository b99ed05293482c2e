"""Which BLAS is in use, and whether what is said of it is so. Each case is a process of its own."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import pytest

from mlxpaged.cpu.blas import INSTALL, OPENBLAS, REFERENCE

WITH_ROUTINES = r"OpenBLAS \(\w+[^)]*\)"
"""Such as Haswell, and after the name how they were chosen."""


def openblas_is_installed() -> bool:
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        return False
    return True


needs_openblas = pytest.mark.skipif(not openblas_is_installed(), reason="needs OpenBLAS, on Linux")


def run(*lines: str, preload: str = "", **variables: str | None) -> str:
    """What a Python of its own prints. Variables that are None are unset there."""
    given = os.environ | {"LD_PRELOAD": preload or None} | variables
    env = {name: value for name, value in given.items() if value is not None}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def described(*imports: str, preload: str = "") -> str:
    return run(*imports, "from mlxpaged.cpu import blas", "print(blas.describe())", preload=preload)


@needs_openblas
def test_openblas_is_loaded_if_it_is_installed() -> None:
    assert re.fullmatch(WITH_ROUTINES, described())
    assert re.fullmatch(WITH_ROUTINES, described("import mlxpaged", "import mlx.core"))


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has its own BLAS")
def test_who_lacks_openblas_is_told_how_to_get_it() -> None:
    missing = (
        "import ctypes",
        "class CDLL(ctypes.CDLL):",
        "    def __init__(self, name, *args, **more):",
        f"        super().__init__('libmissing.so' if name == {OPENBLAS!r} else name, *args, **more)",
        "ctypes.CDLL = CDLL",
    )
    assert described(*missing) == f"{REFERENCE}; {INSTALL}"


@needs_openblas
def test_if_mlx_was_imported_first_the_hint_says_so() -> None:
    assert described("import mlx.core").startswith(f"{REFERENCE}; import mlxpaged before mlx")


@needs_openblas
def test_what_was_loaded_before_both_is_in_use() -> None:
    assert re.fullmatch(WITH_ROUTINES, described("import mlx.core", preload=OPENBLAS))


THREADS = f"import ctypes; print(ctypes.CDLL({OPENBLAS!r}).openblas_get_num_threads())"


@needs_openblas
@pytest.mark.parametrize("variable", [None, "3"])
@pytest.mark.parametrize(("first", "preload"), [("", ""), ("import mlx.core", OPENBLAS)], ids=["loaded", "preloaded"])
def test_a_product_is_computed_by_who_asks_for_it(variable: str | None, first: str, preload: str) -> None:
    """Else its threads and the CPU streams together would be more than there are cores."""
    assert run(first, "import mlxpaged", THREADS, preload=preload, OPENBLAS_NUM_THREADS=variable) == "1"


@needs_openblas
def test_products_of_others_may_have_more() -> None:
    assert run("from mlxpaged.cpu import blas", "blas.use_threads(2)", THREADS) == "2"
