"""Runs a block of a tower in parts, so that other work can go on between them.

A block of a picture of 4,096 patches in Qwen3-VL's largest tower takes 0.2 TFLOP: that is 0.2 s on an M1 at 1 TFLOP/s,
and a step that decodes takes 25 ms. So a block is computed for some of the patches at a time: first the queries, keys
and values of all, then the rest. The largest parts have 21 GFLOP.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import mlx.core as mx

from mlxpaged.vision.attention import attend
from mlxpaged.vision.patches import Rotation

Parts = Generator[mx.array, None, mx.array]

PATCHES = 512
"""Patches of a part, of all pictures together."""


class Block(Protocol):
    """heads: queries, keys and values [3, n, heads, patches, D] of x[n, patches, width], rotated. rest: the block's
    output for x, whose patches have attended: mixed[n, heads, patches, D]."""

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array: ...

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array: ...


def parts_of_block(block: Block, x: mx.array, rotation: Rotation) -> Parts:
    """Yields what has to be computed, part by part. Returns the output [n, patches, width]."""
    count = max(1, PATCHES // len(x))
    slices = [slice(start, start + count) for start in range(0, x.shape[1], count)]
    heads = []
    for some in slices:
        heads.append(block.heads(x[:, some], Rotation(rotation.cosines[some], rotation.sines[some])))
        yield heads[-1]
    queries, keys, values = concatenated(heads, axis=3)
    parts = []
    for some in slices:
        parts.append(block.rest(x[:, some], attend(queries[:, :, some], keys, values)))
        yield parts[-1]
    return concatenated(parts, axis=1)


def concatenated(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def separate(projected: mx.array, heads: int) -> mx.array:
    """[n, patches, width] -> [n, heads, patches, D]"""
    n, patches, _ = projected.shape
    return projected.reshape(n, patches, heads, -1).swapaxes(1, 2)


def join(mixed: mx.array) -> mx.array:
    """The reverse of `separate`."""
    n, _, patches, _ = mixed.shape
    return mixed.swapaxes(1, 2).reshape(n, patches, -1)
