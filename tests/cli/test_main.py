"""The process of the command, where Ctrl-C comes at a bad moment of an import."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_A_DEL = """class Freed:
    def __del__(self): raise KeyboardInterrupt
freed = Freed(); del freed; print("went on")"""
IN_AN_EXTENSION = """try: raise KeyboardInterrupt
except KeyboardInterrupt as error: raise ImportError("the extension has failed") from error"""
START = """import sys
from mlxpaged import __main__, cli
def main(): exec({!r})
cli.main = main
sys.exit(__main__.main())"""


@pytest.mark.parametrize("code", [IN_A_DEL, IN_AN_EXTENSION])
def test_an_interrupt_that_python_or_an_extension_hides_ends_the_command(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_errors_are_shown() -> None:
    code = "raise ImportError('no such module')"
    done = subprocess.run([sys.executable, "-c", START.format(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such module" in done.stderr
