"""exp2 of many numbers at once is what it is one by one."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.cpu.exp2 import HIGHEST, LOWEST, MIN_SIZE, exp2


def exact(exponents: np.ndarray) -> np.ndarray:
    return np.power(2.0, exponents.astype(np.float64))


@pytest.mark.parametrize("count", [MIN_SIZE - 1, MIN_SIZE, 3 * MIN_SIZE])
def test_powers_are_exact_to_the_last_digits(count: int) -> None:
    x = np.random.default_rng(count).uniform(-60, 60, count).astype(np.float32)
    x[:200] = np.arange(-50, 50).repeat(2) / 2  # whole and half numbers
    np.testing.assert_allclose(np.array(exp2(mx.array(x))), exact(x), rtol=4e-7)


def test_exponents_far_from_zero_are_clipped_and_powers_stay_finite() -> None:
    far = [0.0, -0.0, 1e-30, -1e-30, LOWEST, LOWEST - 1, -1e30, -math.inf, HIGHEST, HIGHEST + 1, 1e30, math.inf]
    x = np.zeros(MIN_SIZE, np.float32)
    x[: len(far)] = far
    np.testing.assert_allclose(np.array(exp2(mx.array(x))), exact(np.clip(x, LOWEST, HIGHEST)), rtol=2e-7)


def test_nan_stays_nan() -> None:
    x = np.zeros(MIN_SIZE, np.float32)
    x[7] = np.nan
    assert np.flatnonzero(np.isnan(np.array(exp2(mx.array(x))))).tolist() == [7]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x = mx.linspace(-9, 0, MIN_SIZE).astype(dtype)
    got = exp2(x)
    assert got.dtype == dtype
    assert mx.array_equal(got, mx.power(mx.array(2, dtype), x))


def test_arrays_of_any_shape_and_layout_are_accepted() -> None:
    x = mx.random.uniform(-20, 0, (40, 60, 50))
    turned = np.array(exp2(x.swapaxes(0, 2)))
    np.testing.assert_allclose(turned, exact(np.array(x)).transpose(2, 1, 0), rtol=4e-7)
    assert exp2(x[:, :0]).shape == (40, 0, 50)
