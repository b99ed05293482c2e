"""The command in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxpaged.cli import connection, main, serve
from mlxpaged.cli.bench import command
from tests.cli.helpers import Result
from tests.metal_on_cpu.fixtures import copied_kernels, unchecked

__all__ = ["copied_kernels", "unchecked"]


@pytest.fixture(autouse=True)
def _no_handler_stays() -> Iterator[None]:
    """A command that ran in this process has logged to a stream that pytest closes."""
    yield
    for handler in [each for each in logging.root.handlers if type(each) is logging.StreamHandler]:
        logging.root.removeHandler(handler)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home: no command finds the user's own servers."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(connection, "DEFAULT_URL", "http://127.0.0.1:1")
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, which saves the start of one: two seconds of imports. It logs to pytest, and its end
    is not the end of this process."""
    for name in list(os.environ):
        if name.startswith("MLXPAGED_"):
            monkeypatch.delenv(name)
    for module in (serve, command):
        monkeypatch.setattr(module, "set_up", lambda level: None)
    monkeypatch.setattr(os, "_exit", sys.exit)

    def run(*args: str) -> Result:
        try:
            status = main(args)
        except SystemExit as error:
            status = int(error.code or 0)
        return Result(status, *capsys.readouterr())

    return run
