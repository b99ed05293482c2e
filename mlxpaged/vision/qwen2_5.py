"""The vision tower of Qwen2.5-VL.

The modules have the names of the checkpoints, but for the layers of the merger. In most blocks a patch attends to its
window only, a square that is cut at the lower and the right edge of the picture; in a few to all patches (arXiv
2502.13923, 2.1.1). The patches are row by row, until the merger takes squares of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten

from mlxpaged.vision.attention import attend
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, in_squares, patches_of
from mlxpaged.vision.pixtral import MEAN, STD
from mlxpaged.vision.qwen import frequencies_of

NORM_EPS = 1e-6
"""The same in all norms of the tower; no config.json has it."""


@dataclass(frozen=True)
class Qwen25Sizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. merge: each square of
    merge x merge patches becomes one row of features. window: side of a window in patches. whole: the blocks in which
    a patch attends to all others. output: width of the text model's embeddings. mean, std: of the pixels' colours, from
    0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    merge: int
    window: int
    whole: tuple[int, ...]
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class Attention(Module):
    """Attention of a picture's patches to one another, or to those of their window of `window` x `window`."""

    def __init__(self, sizes: Qwen25Sizes, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = sizes.heads, window
        self.qkv = Linear(sizes.width, 3 * sizes.width)
        self.proj = Linear(sizes.width, sizes.width)

    def __call__(self, x: mx.array, rotation: Rotation) -> mx.array:
        """x: [n, rows, columns, width], and the result."""
        q, k, v = mx.split(self.qkv(x).reshape(*x.shape[:3], 3 * self.heads, -1), 3, axis=3)
        q, k = rotation(q), rotation(k)
        bands = []
        for rows in parts_of(x.shape[1], self.window):
            parts = [
                attend_in(q[:, rows, columns], k[:, rows, columns], v[:, rows, columns], self.window)
                for columns in parts_of(x.shape[2], self.window)
            ]
            bands.append(mx.concatenate(parts, axis=2))
        out: mx.array = self.proj(mx.concatenate(bands, axis=1).flatten(3))
        return out


def parts_of(length: int, window: int | None) -> list[slice]:
    """Returns the part of an axis that whole windows fill, and the rest."""
    filled = length if window is None else length // window * window
    return [part for part in (slice(0, filled), slice(filled, length)) if part.start < part.stop]


def attend_in(queries: mx.array, keys: mx.array, values: mx.array, window: int | None) -> mx.array:
    """Attention within windows of one shape, which fill a part of a picture: [n, rows, columns, heads, D] each."""
    n, rows, columns, heads, size = queries.shape
    high, wide = (length if window is None else min(window, length) for length in (rows, columns))
    shape = (n, rows // high, high, columns // wide, wide, heads, size)

    def apart(x: mx.array) -> mx.array:
        return x.reshape(shape).transpose(0, 1, 3, 5, 2, 4, 6).reshape(-1, heads, high * wide, size)

    mixed = attend(apart(queries), apart(keys), apart(values))
    mixed = mixed.reshape(n, rows // high, columns // wide, heads, high, wide, size)
    return mixed.transpose(0, 1, 4, 2, 5, 3, 6).reshape(queries.shape)


class FeedForward(Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden)
        self.up_proj = Linear(width, hidden)
        self.down_proj = Linear(hidden, width)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(Module):
    def __init__(self, sizes: Qwen25Sizes, window: int | None) -> None:
        super().__init__()
        self.norm1 = RMSNorm(sizes.width, NORM_EPS)
        self.norm2 = RMSNorm(sizes.width, NORM_EPS)
        self.attn = Attention(sizes, window)
        self.mlp = FeedForward(sizes.width, sizes.hidden)

    def __call__(self, x: mx.array, rotation: Rotation) -> mx.array:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Merger(Module):
    """From squares of patches to the text model's width."""

    def __init__(self, sizes: Qwen25Sizes) -> None:
        super().__init__()
        square = sizes.merge**2 * sizes.width
        self.merge = sizes.merge
        self.ln_q = RMSNorm(sizes.width, NORM_EPS)
        self.linear_fc1 = Linear(square, square)
        self.linear_fc2 = Linear(square, sizes.output)

    def __call__(self, x: mx.array) -> mx.array:
        squares = in_squares(self.ln_q(x), self.merge).reshape(len(x), -1, self.merge**2 * x.shape[-1])
        out: mx.array = self.linear_fc2(gelu(self.linear_fc1(squares)))
        return out


class Qwen25Tower(Module):
    """A `Tower`. The sides of its pictures are multiples of patch * merge."""

    def __init__(self, sizes: Qwen25Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        # A convolution by steps of its own width is a linear layer of whole patches. The two frames that it takes are
        # one picture twice, so their weights are added.
        self.patch_embed = {"proj": Linear(sizes.patch**2 * CHANNELS, sizes.width, bias=False)}
        self.blocks = [Block(sizes, None if number in sizes.whole else sizes.window) for number in range(sizes.blocks)]
        self.merger = Merger(sizes)

    @property
    def nbytes(self) -> int:
        weights: Any = tree_flatten(self.parameters())
        return sum(array.nbytes for _, array in weights)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes, project = self.sizes, self.patch_embed["proj"]
        state = patches_of(pixels, sizes.patch, sizes.mean, sizes.std)
        state = project(state.astype(self.merger.ln_q.weight.dtype))
        frequencies = frequencies_of(sizes.width // sizes.heads)
        rotation = Rotation.of(angles_of(state.shape[1], state.shape[2], frequencies, frequencies)[:, :, None])
        for block in self.blocks:
            state = block(state, rotation)
            yield state
        yield self.merger(state)
