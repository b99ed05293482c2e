"""The vision tower of Qwen2-VL, Qwen3-VL, Qwen3.5 and Qwen3.6.

The modules have the names of Qwen3-VL's checkpoints. The patches are in the order of the features: square by square of
merge x merge patches. Positions follow Qwen3VLVisionModel of transformers: an embedding for a grid of a fixed side,
interpolated to the image's, and a rotation whose first frequencies are of the row and whose others of the column.
Qwen2-VL has the rotation only, and no bias of patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, gelu_fast_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, frequencies_of, in_squares, patches_of
from mlxpaged.vision.tower import Tower

NORM_EPS = 1e-6
ROPE_BASE = 10_000.0
"""The same in all of these towers; no config.json has them."""

MEAN = STD = (0.5, 0.5, 0.5)

ACTIVATIONS = {"gelu_pytorch_tanh": gelu_approx, "quick_gelu": gelu_fast_approx}
"""Activations of the feed-forward layers, by their names in config.json."""


@dataclass(frozen=True)
class QwenSizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. merge: each square of
    merge x merge patches becomes one row of features. places: side of the grid that has embeddings; None if there
    are none. deep: the blocks after which features are taken for the first layers of the text model, in order. output:
    width of the text model's embeddings. mean, std: of the pixels' colours, from 0 to 1. activation: of the
    feed-forward layers.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    merge: int
    places: int | None
    deep: tuple[int, ...]
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    activation: Literal["gelu_pytorch_tanh", "quick_gelu"] = "gelu_pytorch_tanh"


class Attention(Module):
    """Its weights. `Block` computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)


class FeedForward(Module):
    def __init__(self, sizes: QwenSizes) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[sizes.activation]
        self.linear_fc1 = Linear(sizes.width, sizes.hidden)
        self.linear_fc2 = Linear(sizes.hidden, sizes.width)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return out


class Block(Module):
    """A `blocks.Block`."""

    def __init__(self, sizes: QwenSizes) -> None:
        super().__init__()
        self.num_heads = sizes.heads
        self.norm1 = LayerNorm(sizes.width, NORM_EPS)
        self.norm2 = LayerNorm(sizes.width, NORM_EPS)
        self.attn = Attention(sizes.width)
        self.mlp = FeedForward(sizes)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        q, k, v = (separate(each, self.num_heads) for each in mx.split(self.attn.qkv(self.norm1(x)), 3, axis=-1))
        return mx.stack([rotation(q), rotation(k), v])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.attn.proj(join(mixed))
        return x + self.mlp(self.norm2(x))


class Merger(Module):
    """From squares of patches to the text model's width. norms_squares: whether the norm sees a whole square."""

    def __init__(self, sizes: QwenSizes, norms_squares: bool) -> None:
        super().__init__()
        self.square = sizes.merge**2 * sizes.width
        self.norms_squares = norms_squares
        self.norm = LayerNorm(self.square if norms_squares else sizes.width, NORM_EPS)
        self.linear_fc1 = Linear(self.square, self.square)
        self.linear_fc2 = Linear(self.square, sizes.output)

    def __call__(self, x: mx.array) -> mx.array:
        squares = (len(x), -1, self.square)
        x = self.norm(x.reshape(squares)) if self.norms_squares else self.norm(x).reshape(squares)
        out: mx.array = self.linear_fc2(gelu(self.linear_fc1(x)))
        return out


class QwenTower(Tower):
    """The sides of its images are multiples of patch * merge. With `deep`, a row of features has a part
    for each of these, after that for the embedding."""

    def __init__(self, sizes: QwenSizes) -> None:
        super().__init__()
        self.sizes = sizes
        # A convolution by steps of its own width is a linear layer of whole patches. The two frames that it takes are
        # one image twice, so their weights are added.
        self.patch_embed = {"proj": Linear(sizes.patch**2 * CHANNELS, sizes.width, bias=sizes.places is not None)}
        if sizes.places is not None:
            self.pos_embed = Embedding(sizes.places**2, sizes.width)
        self.blocks = [Block(sizes) for _ in range(sizes.blocks)]
        self.merger = Merger(sizes, norms_squares=False)
        if sizes.deep:
            self.deepstack_merger_list = [Merger(sizes, norms_squares=True) for _ in sizes.deep]

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes = self.sizes
        rows, columns = (size // sizes.patch for size in pixels.shape[1:3])
        state = self._embedded(pixels, rows, columns)
        frequencies = frequencies_of(sizes.width // sizes.heads // 2, ROPE_BASE)
        rotation = Rotation.of(in_squares(angles_of(rows, columns, frequencies, frequencies)[None], sizes.merge)[0])
        deep = []
        for number, block in enumerate(self.blocks):
            state = yield from parts_of_block(block, state, rotation)
            if number in sizes.deep:
                deep.append(self.deepstack_merger_list[sizes.deep.index(number)](state))
                yield deep[-1]
        features = self.merger(state)
        yield mx.stack([features, *deep], axis=2) if deep else features

    def _embedded(self, pixels: mx.array, rows: int, columns: int) -> mx.array:
        project = self.patch_embed["proj"]
        patches = patches_of(pixels, self.sizes.patch, self.sizes.mean, self.sizes.std)
        embedded = project(patches.astype(project.weight.dtype))
        if self.sizes.places is not None:
            embedded = embedded + self._places(rows, columns, self.sizes.places)
        return in_squares(embedded, self.sizes.merge).astype(project.weight.dtype)

    def _places(self, rows: int, columns: int, places: int) -> mx.array:
        """[rows, columns, width]: the embeddings of the grid, bilinearly interpolated, corner to corner."""
        last = places - 1
        down, across = (mx.linspace(0, last, count) for count in (rows, columns))
        (top, below), (left, right) = (
            (mx.floor(at).astype(mx.int32), mx.minimum(mx.floor(at).astype(mx.int32) + 1, last))
            for at in (down, across)
        )
        by_row, by_column = (down - top)[:, None, None], (across - left)[None, :, None]

        def at(row: mx.array, column: mx.array) -> mx.array:
            embedded: mx.array = self.pos_embed(row[:, None] * places + column)
            return embedded

        upper = at(top, left) * (1 - by_column) + at(top, right) * by_column
        lower = at(below, left) * (1 - by_column) + at(below, right) * by_column
        return upper * (1 - by_row) + lower * by_row
