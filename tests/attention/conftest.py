"""The means to run Metal kernels: on a Mac for real, elsewhere on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.metal_on_cpu import Interpreter
from tests.metal_on_cpu.fixtures import metal, metal_on_cpu

__all__ = ["metal", "metal_on_cpu"]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The fixture `metal` without the checks of loads and stores, for large cases."""
    if mx.metal.is_available():
        yield
        return
    with Interpreter(checked=False).installed():
        yield
