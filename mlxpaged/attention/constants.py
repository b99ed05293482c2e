"""Numbers as arrays that are there already.

A number in an operation costs MLX an operation more, which makes it as large as the other operand. On a CPU that is
some 5 us for each, on the thread that no layer can do without, and a step had several hundred. On a GPU it is nothing,
and to wait for a number there would be much.
"""

from __future__ import annotations

import functools

import mlx.core as mx

MOST = 16_384
"""A prompt's step needs ten for every shape of scores, of which each 64 of its tokens have one. Were it more than are
kept, every layer would find none."""


def constant(value: float, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """`value` for an operation with arrays of that shape. It holds one number: on a CPU an array of that shape that is
    there already."""
    if mx.default_device() != mx.Device(mx.cpu):
        return mx.array(value, dtype)
    return broadcast(value, shape, dtype)


@functools.lru_cache(maxsize=MOST)
def broadcast(value: float, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.broadcast_to(mx.array(value, dtype), shape)
    mx.eval(array)
    return array
