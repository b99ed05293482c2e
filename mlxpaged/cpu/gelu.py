"""Computes GELU (arXiv 1606.08415) without the error function of the C library.

MLX's CPU backend takes 54 ns for an element of it, on one core: two thirds of the time of a small encoder. A quotient
of two polynomials takes 10 ns, because additions and products are vectorised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx.nn.layers import activations

gelu_of_mlx: Callable[[mx.array], mx.array] = activations.gelu

LARGEST = 4 * math.sqrt(2)
"""Arguments beyond this count as this: erf(4) is 1 in float32."""

NUMERATOR = (
    *(-1.60960333262415e-02, -2.95459980854025e-03, -7.34990630326855e-04, -5.69250639462346e-05),
    *(-2.10102402082508e-06, 2.77068142495902e-08, -2.72614225801306e-10),
)
DENOMINATOR = (
    *(-1.42647390514189e-02, -7.37332916720468e-03, -1.68282697438203e-03, -2.13374055278905e-04),
    -1.45660718464996e-05,
)
"""erf(z) is z * NUMERATOR(z**2) / DENOMINATOR(z**2) for |z| <= 4, lowest degree first (Eigen's
generic_fast_erf_float)."""


def halved(coefficients: Sequence[float], factor: float = 1.0) -> tuple[float, ...]:
    """The coefficients for x = z * sqrt(2), times a factor."""
    return tuple(factor * coefficient / 2**degree for degree, coefficient in enumerate(coefficients))


OF_X, BELOW_X = halved(NUMERATOR, math.sqrt(0.5) / 2), halved(DENOMINATOR)


def gelu(x: mx.array) -> mx.array:
    """x * (1 + erf(x / sqrt(2))) / 2. For float32, the error is at most 1.2e-6."""
    if x.dtype != mx.float32:
        return gelu_of_mlx(x)
    x = mx.maximum(x, -LARGEST)  # below, the result is 0
    near = mx.minimum(x, LARGEST)
    square = near * near
    return x * (near * polynomial(OF_X, square) / polynomial(BELOW_X, square) + 0.5)


def polynomial(coefficients: Sequence[float], x: mx.array) -> mx.array:
    result = mx.array(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result
