"""The vision tower of Kimi-VL, MoonViT, and its projector.

The modules have the names of the checkpoints. Positions follow the models' own code (MoonVitPretrainedModel): an
embedding for a grid of a fixed size, interpolated to the image's, and a rotation in which the pairs of a head's
elements turn with the column of a patch and with its row by turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.families.qwen.tower import ROPE_BASE
from mlxpaged.vision.interpolation import bicubic, interpolated
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, frequencies_of, in_squares, patches_of
from mlxpaged.vision.tower import Tower

NORM_EPS = 1e-5
"""The same in all norms of the tower and the projector; no config.json has it."""

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class KimiSizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. places: rows and columns of the
    grid that has embeddings. merge: each square of merge x merge patches becomes one row of features. output: width of
    the text model's embeddings. mean, std: of the pixels' colours, from 0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    places: tuple[int, int]
    merge: int
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class FeedForward(Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc0 = Linear(width, hidden)
        self.fc1 = Linear(hidden, width)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc1(gelu_approx(self.fc0(x)))
        return out


class Block(Module):
    """A `blocks.Block`."""

    def __init__(self, sizes: KimiSizes) -> None:
        super().__init__()
        self.num_heads = sizes.heads
        self.norm0 = LayerNorm(sizes.width, NORM_EPS)
        self.norm1 = LayerNorm(sizes.width, NORM_EPS)
        self.wqkv = Linear(sizes.width, 3 * sizes.width)
        self.wo = Linear(sizes.width, sizes.width)
        self.mlp = FeedForward(sizes.width, sizes.hidden)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        q, k, v = (separate(each, self.num_heads) for each in mx.split(self.wqkv(self.norm0(x)), 3, axis=-1))
        return mx.stack([rotation(pairs_apart(q)), rotation(pairs_apart(k)), v])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.wo(join(mixed))
        return x + self.mlp(self.norm1(x))


def pairs_apart(heads: mx.array) -> mx.array:
    """Returns [..., D] with the first element of each pair in the first half and the second in the second half, where
    `Rotation` has them. The scores of attention do not change if queries and keys have the same order."""
    return mx.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)


class VisionTower(Module):
    """The embedding of the patches, the blocks, and the norm after them."""

    def __init__(self, sizes: KimiSizes) -> None:
        super().__init__()
        self.patch_embed = {
            # A convolution by steps of its own width is a linear layer of whole patches.
            "proj": Linear(sizes.patch**2 * CHANNELS, sizes.width),
            "pos_emb": {"weight": mx.zeros((*sizes.places, sizes.width))},
        }
        self.encoder = {
            "blocks": [Block(sizes) for _ in range(sizes.blocks)],
            "final_layernorm": LayerNorm(sizes.width, NORM_EPS),
        }


class Projector(Module):
    """From squares of patches to the text model's width."""

    def __init__(self, sizes: KimiSizes) -> None:
        super().__init__()
        square = sizes.merge**2 * sizes.width
        self.merge = sizes.merge
        self.pre_norm = LayerNorm(sizes.width, NORM_EPS)
        self.linear_1 = Linear(square, square)
        self.linear_2 = Linear(square, sizes.output)

    def __call__(self, grid: mx.array) -> mx.array:
        """grid: [images, rows, columns, width]."""
        squares = in_squares(self.pre_norm(grid), self.merge).reshape(len(grid), -1, self.merge**2 * grid.shape[-1])
        out: mx.array = self.linear_2(gelu(self.linear_1(squares)))
        return out


class KimiTower(Tower):
    """The sides of its images are multiples of patch * merge."""

    def __init__(self, sizes: KimiSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(sizes)
        self.multi_modal_projector = Projector(sizes)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        rows, columns = (size // self.sizes.patch for size in pixels.shape[1:3])
        encoder: Any = self.vision_tower.encoder
        state = self._embedded(pixels, rows, columns)
        rotation = self._rotation(rows, columns)
        for block in encoder["blocks"]:
            state = yield from parts_of_block(block, state, rotation)
        yield self.multi_modal_projector(encoder["final_layernorm"](state).reshape(len(state), rows, columns, -1))

    def _embedded(self, pixels: mx.array, rows: int, columns: int) -> mx.array:
        parts: Any = self.vision_tower.patch_embed
        grid = parts["pos_emb"]["weight"]
        patches = patches_of(pixels, self.sizes.patch, self.sizes.mean, self.sizes.std)
        places = interpolated(grid, bicubic(rows, grid.shape[0]), bicubic(columns, grid.shape[1]))
        embedded: mx.array = parts["proj"](patches.astype(grid.dtype)) + places.astype(grid.dtype)
        return embedded.flatten(1, 2)

    def _rotation(self, rows: int, columns: int) -> Rotation:
        frequencies = frequencies_of(self.sizes.width // self.sizes.heads // 2, ROPE_BASE)
        of_row, of_column = mx.split(angles_of(rows, columns, frequencies, frequencies), 2, axis=-1)
        return Rotation.of(mx.stack([of_column, of_row], axis=-1).reshape(rows * columns, -1))
