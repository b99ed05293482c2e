"""The vision tower of Gemma 3, which is SigLIP's, and its projector.

The modules have the names of the checkpoints. All images have one size, and each patch of it an embedding of its
place (SiglipVisionModel and Gemma3MultiModalProjector of transformers). The text model multiplies its embeddings by a
number, features included. The features are divided by it, since the projector has made them to its measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.vision.patches import in_squares, patches_of
from mlxpaged.vision.siglip import VisionTower
from mlxpaged.vision.tower import Tower

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Gemma3Sizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. patches: rows and columns of an
    image. pool: each square of pool x pool patches becomes one row of features. eps: of all norms. output: width of
    the text model's embeddings. mean, std: of the pixels' colours, from 0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    patches: int
    pool: int
    eps: float
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class Projector(Module):
    """From squares of patches to the text model's width."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        self.pool, self.eps = sizes.pool, sizes.eps
        self.mm_soft_emb_norm = {"weight": mx.zeros(sizes.width)}
        self.mm_input_projection_weight = mx.zeros((sizes.width, sizes.output))

    def __call__(self, grid: mx.array) -> mx.array:
        """grid: [images, rows, columns, width]. Each square's mean goes through the norm, which multiplies by 1 + its
        weight."""
        squares = in_squares(grid, self.pool).reshape(len(grid), -1, self.pool**2, grid.shape[-1])
        pooled = squares.astype(mx.float32).mean(axis=2)
        normed = mx.fast.rms_norm(pooled, 1 + self.mm_soft_emb_norm["weight"].astype(mx.float32), self.eps)
        projection = self.mm_input_projection_weight
        # Divided before the projection, so that the features are rounded once.
        return (normed / factor_of_text(projection.shape[1])).astype(projection.dtype) @ projection


def factor_of_text(width: int) -> mx.array:
    """Returns the number by which the text model multiplies embeddings: it is rounded to bfloat16 whatever their type
    (mlx_lm/models/gemma3_text.py)."""
    return mx.array(width**0.5, mx.bfloat16).astype(mx.float32)


class Gemma3Tower(Tower):
    """All images of a prompt are squares of patches * patch pixels. It takes smaller ones too, whose sides are
    multiples of patch * pool: they have the first places of each row and column."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(
            *(sizes.width, sizes.hidden, sizes.blocks, sizes.heads, sizes.patch, sizes.patches**2, sizes.eps)
        )
        self.multi_modal_projector = Projector(sizes)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes, tower = self.sizes, self.vision_tower
        patches = patches_of(pixels, sizes.patch, sizes.mean, sizes.std)
        rows, columns = patches.shape[1:3]
        places = tower.places.reshape(sizes.patches, sizes.patches, -1)[:rows, :columns]
        state = yield from tower.encode(patches, places)
        yield self.multi_modal_projector(state.reshape(len(state), rows, columns, -1))
