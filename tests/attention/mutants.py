"""Mutants of kernels: each a mistake one could make in them, and each caught by the numbers or by a check.

A mutant that no test catches is a hole in the tests; a new line in a kernel deserves a mutant.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxpaged.attention import kernels
from tests.metal_on_cpu import Interpreter, MetalError, is_supported
from tests.support import every

Scenario = Callable[[], bool]
"""Runs kernels. Returns whether the numbers are right."""

Mutant = tuple[str, str, str, Scenario, type[MetalError] | None]
"""Kernel or header, what is replaced, by what, where it shows, what must be said of it. None: it runs and the numbers
are off."""

needs_kernels = pytest.mark.skipif(not is_supported(), reason="needs the kernels to run on the CPU")


def mutant_tests(mutants: Mapping[str, Mutant]) -> tuple[Callable[..., None], Callable[..., None]]:
    """The tests of a file: every mutant is caught, and without one the numbers of every scenario are right. By default,
    a quarter of the mutants run."""

    @needs_kernels
    @pytest.mark.parametrize("name", every(4, mutants))
    def test_mutant_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel, old, new, scenario, error = mutants[name]
        directory = shutil.copytree(kernels.kernel_directory(), tmp_path / "kernels")
        is_header = kernel.endswith(".h")
        path = directory / (kernel if is_header else f"{kernel}.metal")
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
                with pytest.raises(error, match=None if is_header else kernel):
                    scenario()

    @needs_kernels
    @pytest.mark.parametrize(
        "scenario", dict.fromkeys(mutant[3] for mutant in mutants.values()), ids=lambda scenario: scenario.__name__
    )
    def test_without_a_mutant_all_is_well(scenario: Scenario) -> None:
        with Interpreter().installed():
            assert scenario()

    return test_mutant_is_caught, test_without_a_mutant_all_is_well
