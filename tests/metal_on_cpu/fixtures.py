"""The pytest fixtures. A conftest.py takes one with `from tests.metal_on_cpu.fixtures import metal_on_cpu`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.attention import kernels

from . import Interpreter, is_supported


@pytest.fixture
def metal_on_cpu() -> Iterator[Interpreter]:
    """The interpreter, in place of `mx.fast.metal_kernel` for one test. On macOS the test is skipped."""
    if not is_supported():
        pytest.skip("metal_on_cpu runs on Linux; on a Mac the kernels run for real")
    with Interpreter().installed() as interpreter:
        yield interpreter


@pytest.fixture
def metal() -> Iterator[None]:
    """For tests that look at results only, and so run on a Mac as well."""
    if mx.metal.is_available():
        yield
        return
    with Interpreter().installed():
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The fixture `metal` without the checks of loads and stores, for large cases."""
    if mx.metal.is_available():
        yield
        return
    with Interpreter(checked=False).installed():
        yield


@pytest.fixture
def copied_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The Metal sources in a place where a test may change them."""
    directory = tmp_path / "metal_kernels"
    shutil.copytree(kernels.kernel_directory(), directory)
    monkeypatch.setattr(kernels, "kernel_directory", lambda: directory)
    kernels.build.cache_clear()
    yield directory
    kernels.build.cache_clear()
