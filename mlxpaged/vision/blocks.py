"""Runs a block of a tower in parts, so that other work can go on between them.

A block of an image of 4,096 patches in Qwen3-VL's largest tower takes 0.2 TFLOP: that is 0.2 s on an M1 at 1 TFLOP/s,
and a step that decodes takes 25 ms. So a block is computed for some of the patches at a time: first the queries, keys
and values of all, then the rest. The largest parts have 21 GFLOP. They are smaller if they would take too long.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Literal, Protocol

import mlx.core as mx

from mlxpaged.vision.attention import attend
from mlxpaged.vision.patches import Rotation

Parts = Generator[mx.array, None, mx.array]

MOST, LEAST, UNIT = 512, 64, 32
"""Patches of a part, of all images together: the most, the fewest, and what a size is a multiple of."""


Phase = Literal["heads", "rest"]

FOLLOWING: dict[Phase, Phase] = {"heads": "rest", "rest": "heads"}


class Pace:
    """The size of the parts, by what the last ones took. All encodings run on one thread. patches: of the next part, by
    its phase, because the rest takes several times as long."""

    def __init__(self) -> None:
        self.patches: dict[Phase, int] = {}
        self.reset()

    def reset(self) -> None:
        """Make the next parts as large as they get."""
        self.patches = {"heads": MOST, "rest": MOST}
        self._seconds: dict[Phase, float] = {}  # of a patch
        self._taken: tuple[Phase, int] | None = None  # the phase of the last part, and its patches
        self._next: Phase | None = None  # None for a part that is none of a block's, or may be

    def begin(self) -> None:
        """Another encoding begins, whose first parts are small: an image of other sides takes other times."""
        self.reset()
        self.patches = {"heads": LEAST, "rest": LEAST}

    def fit(self, seconds: float) -> bool | None:
        """Make the next part take no longer. Returns False if the smallest one does, or may: none of its phase has been
        measured. Returns None if the next part is not one of a block."""
        if self._next is None:
            return None
        known = self._seconds.get(self._next)
        if known is None:
            return False
        fitting = MOST if known * MOST <= seconds else int(seconds / known) // UNIT * UNIT
        self.patches[self._next] = max(LEAST, fitting)
        return fitting >= LEAST

    def measure(self, seconds: float) -> None:
        """Note what the last part took."""
        if self._taken is None:
            self._next = None
            return
        phase, patches = self._taken
        self._taken = None
        found = seconds / patches
        self._seconds[phase] = (found + self._seconds.get(phase, found)) / 2

    def slices(self, phase: Phase, length: int, unit: int) -> Iterator[slice]:
        """Yields consecutive slices of a length. unit: patches of an element."""
        start = 0
        while start < length:
            end = min(length, start + max(1, self.patches[phase] // unit))
            self._taken = phase, (end - start) * unit
            self._next = phase if end < length else FOLLOWING[phase]
            yield slice(start, end)
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
