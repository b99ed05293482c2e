"""Runs a block of a tower in parts, so that other work can go on between them.

A block of an image of 4,096 patches in Qwen3-VL's largest tower takes 0.2 TFLOP: that is 0.2 s on an M1 at 1 TFLOP/s,
and a step that decodes takes 25 ms. So a block is computed for some of the patches at a time: first the queries, keys
and values of all, then the rest. The largest parts have 21 GFLOP. They get smaller where they take longer than a step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Literal, Protocol

import mlx.core as mx

from mlxpaged.vision.attention import attend
from mlxpaged.vision.patches import Rotation

Parts = Generator[mx.array, None, mx.array]

MOST, LEAST = 512, 64
"""Patches of a part, of all images together."""


Phase = Literal["heads", "rest"]


class Pace:
    """The size of the parts. All encodings run on one thread. patches: of the next part, by its phase, because the rest
    takes several times as long."""

    def __init__(self) -> None:
        self.patches: dict[Phase, int] = {}
        self.reset()
        self._phase: Phase = "heads"  # of the last part

    def reset(self) -> None:
        """Make the next parts as large as they get."""
        self.patches = {"heads": MOST, "rest": MOST}

    def adapt(self, seconds: float, allowed: float) -> None:
        """Follow what the last part took: the next ones are smaller if it took longer than is allowed, and larger if it
        took less than a third of that."""
        patches = self.patches[self._phase]
        if seconds > allowed:
            self.patches[self._phase] = max(LEAST, patches // 2)
        elif 3 * seconds < allowed:
            self.patches[self._phase] = min(MOST, patches * 2)

    def slices(self, phase: Phase, length: int, unit: int) -> Iterator[slice]:
        """Yields consecutive slices of a length. unit: patches of an element."""
        start = 0
        while start < length:
            self._phase = phase
            end = start + max(1, self.patches[phase] // unit)
            yield slice(start, min(length, end))
            start = end


pace = Pace()


class Block(Protocol):
    """heads: queries, keys and values [3, n, heads, patches, D] of x[n, patches, width], rotated. rest: the block's
    output for x, whose patches have attended: mixed[n, heads, patches, D]."""

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array: ...

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array: ...


def parts_of_block(block: Block, x: mx.array, rotation: Rotation) -> Parts:
    """Yields what has to be computed, part by part. Returns the output [n, patches, width]."""
    heads = []
    for some in pace.slices("heads", x.shape[1], len(x)):
        heads.append(block.heads(x[:, some], Rotation(rotation.cosines[some], rotation.sines[some])))
        yield heads[-1]
    queries, keys, values = concatenated(heads, axis=3)
    parts = []
    for some in pace.slices("rest", x.shape[1], len(x)):
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
