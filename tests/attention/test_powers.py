"""Powers of many exponents at once are what they are one by one."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.powers import HIGHEST, LOWEST, MANY, power_of


def exact(base: float, exponents: np.ndarray) -> np.ndarray:
    return np.power(float(base), exponents.astype(np.float64))


@pytest.mark.parametrize("count", [MANY - 1, MANY, 3 * MANY])
@pytest.mark.parametrize("base", [2, 1 / math.e])
def test_they_are_exact_to_the_last_digits(base: float, count: int) -> None:
    x = np.random.default_rng(count).uniform(-60, 60, count).astype(np.float32)
    x[:200] = np.arange(-50, 50).repeat(2) / 2  # whole and half numbers
    got = np.array(power_of(base, mx.array(x)))
    np.testing.assert_allclose(got, exact(base, x), rtol=6e-6 if base != 2 else 4e-7)


def test_far_ones_are_cut_off_and_stay_finite() -> None:
    far = [0.0, -0.0, 1e-30, -1e-30, LOWEST, LOWEST - 1, -1e30, -math.inf, HIGHEST, HIGHEST + 1, 1e30, math.inf]
    x = np.zeros(MANY, np.float32)
    x[: len(far)] = far
    got = np.array(power_of(2, mx.array(x)))
    np.testing.assert_allclose(got, exact(2, np.clip(x, LOWEST, HIGHEST)), rtol=2e-7)


def test_what_is_not_a_number_stays_so() -> None:
    x = np.zeros(MANY, np.float32)
    x[7] = np.nan
    got = np.array(power_of(2, mx.array(x)))
    assert np.flatnonzero(np.isnan(got)).tolist() == [7]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x = mx.linspace(-9, 0, MANY).astype(dtype)
    got = power_of(2, x)
    assert got.dtype == dtype
    assert mx.array_equal(got, mx.power(mx.array(2, dtype), x))


def test_any_shape_and_layout_will_do() -> None:
    x = mx.random.uniform(-20, 0, (40, 60, 50))
    turned = np.array(power_of(2, x.swapaxes(0, 2)))
    np.testing.assert_allclose(turned, exact(2, np.array(x)).transpose(2, 1, 0), rtol=4e-7)
    assert power_of(2, x[:, :0]).shape == (40, 0, 50)
