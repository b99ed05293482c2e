"""A number as an array: it is there once, and holds one number."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxpaged.attention.constants import constant

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="on a GPU nothing is kept")


@on_cpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_it_is_that_number_everywhere(dtype: mx.Dtype) -> None:
    array = constant(2.5, (3, 1, 4), dtype)
    assert array.dtype == dtype
    assert mx.array_equal(array, mx.full((3, 1, 4), 2.5, dtype))
    assert array is constant(2.5, (3, 1, 4), dtype)
    assert array is not constant(2.5, (3, 1, 5), dtype)


def test_on_a_gpu_it_is_a_number_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    array = constant(2.5, (3, 1, 4), mx.float16)
    assert (array.shape, array.dtype, array.item()) == ((), mx.float16, 2.5)


@on_cpu
def test_a_large_one_takes_no_memory() -> None:
    before = mx.get_active_memory()
    array = constant(0.0, (1000, 1000, 1000))
    assert array.shape == (1000, 1000, 1000)
    assert mx.get_active_memory() - before < 100_000
