"""Mutants of kernels: each a mistake one could make in them, and each caught by the numbers or by a check.

A mutant that no test catches is a hole in the tests; a new line in a kernel deserves a mutant.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxpaged.attention import kernels
from tests.metal_on_cpu import Interpreter, MetalError

Scenario = Callable[[], bool]
"""Runs kernels. Returns whether the numbers are right."""

Mutant = tuple[str, str, str, Scenario, type[MetalError] | None]
"""Kernel, what is replaced, by what, where it shows, what must be said of it. None: it runs and the numbers are off."""


def check_mutant(mutant: Mutant, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new, scenario, error = mutant
    directory = shutil.copytree(kernels.kernel_directory(), directory / "kernels")
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


def scenarios(mutants: Mapping[str, Mutant]) -> list[Scenario]:
    return list(dict.fromkeys(mutant[3] for mutant in mutants.values()))
