"""The pytest fixtures. A conftest.py takes one with `from tests.metal_on_cpu.fixtures import metal_on_cpu`."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

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
