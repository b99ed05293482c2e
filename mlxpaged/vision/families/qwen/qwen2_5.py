"""The vision tower of Qwen2.5-VL.

The modules have the names of the checkpoints, but for the layers of the merger. In most blocks a patch attends to its
window only, a square that is cut at the lower and the right edge of the image; in a few to all patches (arXiv
2502.13923, 2.1.1). The patches are row by row, until the merger takes squares of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from mlxpaged.vision.attention import attend
from mlxpaged.vision.blocks import Parts, concatenated, pace
from mlxpaged.vision.families.pixtral.tower import MEAN, STD
from mlxpaged.vision.families.qwen.tower import ROPE_BASE
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, frequencies_of, in_squares, patches_of
from mlxpaged.vision.tower import Tower

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
    """Its weights. `Block` computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)


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
    """window: side of the windows in which its patches attend; None if they attend to all."""

    def __init__(self, sizes: Qwen25Sizes, window: int | None) -> None:
        super().__init__()
        self.num_heads, self.window = sizes.heads, window
        self.norm1 = RMSNorm(sizes.width, NORM_EPS)
        self.norm2 = RMSNorm(sizes.width, NORM_EPS)
        self.attn = Attention(sizes.width)
        self.mlp = FeedForward(sizes.width, sizes.hidden)

    def parts(self, x: mx.array, rotation: Rotation) -> Parts:
        """Does what `parts_of_block` does. x: [n, rows, columns, width]."""
        bands, unit, patches = [], self.window or 1, len(x) * x.shape[2]
        for rows in pace.slices("heads", x.shape[1], patches):
            own = Rotation(rotation.cosines[rows], rotation.sines[rows])
            projected = self.attn.qkv(self.norm1(x[:, rows]))
            q, k, v = mx.split(projected.reshape(*projected.shape[:3], 3 * self.num_heads, -1), 3, axis=3)
            bands.append(mx.stack([own(q), own(k), v]))
            yield bands[-1]
        heads = concatenated(bands, axis=2)
        parts = []
        for windows in pace.slices("rest", -(-x.shape[1] // unit), patches * unit):
            rows = slice(windows.start * unit, windows.stop * unit)
            mixed = attend_whole(heads, rows) if self.window is None else attend_in_windows(heads[:, :, rows], unit)
            y = x[:, rows] + self.attn.proj(mixed.flatten(3))
            parts.append(y + self.mlp(self.norm2(y)))
            yield parts[-1]
        return concatenated(parts, axis=1)


def attend_whole(heads: mx.array, rows: slice) -> mx.array:
    """Attention of the patches of some rows to all. heads: [3, n, rows, columns, heads, D]."""
    queries, keys, values = (each.flatten(1, 2).swapaxes(1, 2) for each in (heads[0][:, rows], heads[1], heads[2]))
    return attend(queries, keys, values).swapaxes(1, 2).reshape(heads[0][:, rows].shape)


def attend_in_windows(heads: mx.array, window: int) -> mx.array:
    """Attention within windows of window x window patches, which are cut at the lower and the right edge. heads:
    [3, n, rows, columns, heads, D]."""
    bands = []
    for rows in parts_of(heads.shape[2], window):
        band = heads[:, :, rows]
        parts = [attend_in(band[:, :, :, columns], window) for columns in parts_of(heads.shape[3], window)]
        bands.append(mx.concatenate(parts, axis=2))
    return mx.concatenate(bands, axis=1)


def parts_of(length: int, window: int) -> list[slice]:
    """Returns the part of an axis that whole windows fill, and the rest."""
    filled = length // window * window
    return [part for part in (slice(0, filled), slice(filled, length)) if part.start < part.stop]


def attend_in(heads: mx.array, window: int) -> mx.array:
    """Attention within windows of one shape, which fill a part of an image. heads: [3, n, rows, columns, heads, D]."""
    _, n, rows, columns, num_heads, size = heads.shape
    high, wide = min(window, rows), min(window, columns)
    apart = heads.reshape(3, n, rows // high, high, columns // wide, wide, num_heads, size)
    queries, keys, values = apart.transpose(0, 1, 2, 4, 6, 3, 5, 7).reshape(3, -1, num_heads, high * wide, size)
    mixed = attend(queries, keys, values).reshape(n, rows // high, columns // wide, num_heads, high, wide, size)
    return mixed.transpose(0, 1, 4, 2, 5, 3, 6).reshape(n, rows, columns, num_heads, size)


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


class Qwen25Tower(Tower):
    """The sides of its images are multiples of patch * merge."""

    def __init__(self, sizes: Qwen25Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        # A convolution by steps of its own width is a linear layer of whole patches. The two frames that it takes are
        # one image twice, so their weights are added.
        self.patch_embed = {"proj": Linear(sizes.patch**2 * CHANNELS, sizes.width, bias=False)}
        self.blocks = [Block(sizes, None if number in sizes.whole else sizes.window) for number in range(sizes.blocks)]
        self.merger = Merger(sizes)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes, project = self.sizes, self.patch_embed["proj"]
        state = patches_of(pixels, sizes.patch, sizes.mean, sizes.std)
        state = project(state.astype(self.merger.ln_q.weight.dtype))
        frequencies = frequencies_of(sizes.width // sizes.heads // 2, ROPE_BASE)
        rotation = Rotation.of(angles_of(state.shape[1], state.shape[2], frequencies, frequencies)[:, :, None])
        for block in self.blocks:
            state = yield from block.parts(state, rotation)
        yield self.merger(state)
