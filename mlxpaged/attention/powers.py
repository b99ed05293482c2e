"""A number to the power of many, which softmax and sigmoid are made of.

MLX's CPU computes powers one by one with the C library: 6 ns each. Additions, products and shifts it computes eight at
a time, 0.15 to 0.3 ns each, and a power can be made of seventeen of them.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxpaged.attention.constants import constant

MANY = 60_000
"""Elements from which on seventeen operations, which have to be made and sent, take less time than one."""

LOWEST, HIGHEST = -100.0, 126.0
"""Of the exponents of two: below, a weight is nothing beside one of 1, and normal numbers are fast to compute with."""

ROUNDER = 1.5 * 2**23
"""Added to a float32 of a smaller size than 2**22 it leaves the nearest whole number, in the last bits of the sum."""

MANTISSA_BITS = 23

COEFFICIENTS = (1.00000007, 0.69314697, 0.2402212, 0.05550713, 0.00967554, 0.00132765)
"""Of 2**f for f from -1/2 to 1/2, by powers of f: no polynomial of this degree has a smaller relative error, 7.5e-8."""


def power_of(base: float, exponents: mx.array) -> mx.array:
    """`base ** exponents`. Where there are many of float32 on a CPU, results are between 2**LOWEST and 2**HIGHEST, and
    their relative error up to 3e-7 (6e-6 where the base is not 2, far from 1)."""
    if exponents.size < MANY or exponents.dtype != mx.float32 or mx.default_device() != mx.Device(mx.cpu):
        return mx.power(constant(base, exponents.shape, exponents.dtype), exponents)
    return exp2(exponents if base == 2 else exponents * constant(math.log2(base), exponents.shape))


def exp2(x: mx.array) -> mx.array:
    """2**x as 2**f, by a polynomial, times 2**n, where n is the nearest whole number and is added to the bits of the
    float's own exponent."""

    def of(value: float, dtype: mx.Dtype = mx.float32) -> mx.array:
        return constant(value, x.shape, dtype)

    x = mx.minimum(mx.maximum(x, of(LOWEST)), of(HIGHEST))
    shifted = x + of(ROUNDER)
    f = x - (shifted - of(ROUNDER))
    *others, highest = COEFFICIENTS
    power = of(highest)
    for coefficient in reversed(others):
        power = power * f + of(coefficient)
    n = shifted.view(mx.int32) << of(MANTISSA_BITS, mx.int32)
    return (power.view(mx.int32) + n).view(mx.float32)
