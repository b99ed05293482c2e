"""Numbers as arrays that are there already.

A number in an operation costs MLX an operation more, which makes it as large as the other operand. On a CPU that is
some 5 us for each, on the thread that no layer can do without, and a step had several hundred.
"""

from __future__ import annotations

import functools

import mlx.core as mx


@functools.lru_cache(maxsize=1024)
def constant(value: float, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """An array of that shape that is `value` everywhere. It holds one number."""
    array = mx.broadcast_to(mx.array(value, dtype), shape)
    mx.eval(array)
    return array
