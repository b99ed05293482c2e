"""GELU by polynomials is that of the error function, and keeps numbers that are none."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlxpaged.cpu.gelu import gelu


def test_it_is_exact_to_the_last_digits() -> None:
    x = np.concatenate([np.linspace(-12, 12, 20_001), [0.0, 1e30, -1e30]]).astype(np.float32)
    exact = 0.5 * x.astype(np.float64) * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    np.testing.assert_allclose(np.array(gelu(mx.array(x))), exact, rtol=1e-6, atol=1.2e-6)


def test_numbers_that_are_none_stay_so() -> None:
    assert np.isnan(np.array(gelu(mx.array([math.nan, 1.0])))).tolist() == [True, False]
    assert float(gelu(mx.array([math.inf])).item()) == math.inf


def test_half_types_keep_their_type() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        assert gelu(mx.array([1.0], dtype=dtype)).dtype == dtype
