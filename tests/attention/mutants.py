"""How a mutant of a kernel is run: a copy of the Metal sources with one mistake in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.attention import kernels
from tests.metal_on_cpu import Interpreter, MetalError

Mutant = tuple[str, str, str, Callable[[], bool], type[MetalError] | None]
"""Kernel, what is replaced, by what, where it shows, what must be said of it. None: it runs, and the scenario says that
it is wrong."""


def check_that_it_is_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new, scenario, error = mutant
    directory = shutil.copytree(kernels.kernel_directory(), tmp_path / "kernels")
    path = directory / f"{kernel}.metal"
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))
    monkeypatch.setattr(kernels, "kernel_directory", lambda: directory)
    with Interpreter().installed():
        if error is None:
            try:
                assert not scenario(), "the numbers are right"
            except MetalError:
                pytest.fail("a check catches it: say which")
        else:
            with pytest.raises(error, match=kernel):
                scenario()
