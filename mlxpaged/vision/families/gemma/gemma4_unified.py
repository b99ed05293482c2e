"""What a Gemma 4 without a vision tower has in its place: large patches go through a linear layer.

The modules have the names of the checkpoints. Nothing attends (Gemma4UnifiedVisionEmbedder of transformers). The
features are divided as those of `gemma4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.vision.families.gemma.gemma4 import projected
from mlxpaged.vision.patches import CHANNELS, patches_of
from mlxpaged.vision.tower import Tower

NORM_EPS = 1e-5
"""The same in all norms but the projector's; no config.json has it."""

MEAN, STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Gemma4UnifiedSizes:
    """What a tower is built by.

    width: of the patches' embeddings. patch: side in pixels of what becomes one row of features. places: rows and
    columns that have embeddings. eps: of the projector's norm. output: width of the text model's embeddings. mean, std:
    of the pixels' colours, from 0 to 1.
    """

    width: int
    patch: int
    places: int
    eps: float
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class VisionEmbedder(Module):
    """pos_embedding: [places, 2, width], of columns and of rows."""

    def __init__(self, sizes: Gemma4UnifiedSizes) -> None:
        super().__init__()
        colours = sizes.patch**2 * CHANNELS
        self.patch_ln1 = LayerNorm(colours, NORM_EPS)
        self.patch_dense = Linear(colours, sizes.width)
        self.patch_ln2 = LayerNorm(sizes.width, NORM_EPS)
        self.pos_embedding = mx.zeros((sizes.places, 2, sizes.width))
        self.pos_norm = LayerNorm(sizes.width, NORM_EPS)

    def __call__(self, patches: mx.array) -> mx.array:
        """patches: [n, rows, columns, colours]. Returns [n, rows * columns, width]."""
        of_columns, of_rows = self.pos_embedding[: patches.shape[2], 0], self.pos_embedding[: patches.shape[1], 1]
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(patches.astype(self.pos_embedding.dtype))))
        out: mx.array = self.pos_norm(x + (of_rows[:, None] + of_columns)).flatten(1, 2)
        return out


class Gemma4UnifiedTower(Tower):
    """Its work is one part. The sides of its images are multiples of `patch`."""

    def __init__(self, sizes: Gemma4UnifiedSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_embedder = VisionEmbedder(sizes)
        self.embed_vision = {"embedding_projection": Linear(sizes.width, sizes.output, bias=False)}

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes = self.sizes
        state = self.vision_embedder(patches_of(pixels, sizes.patch, sizes.mean, sizes.std))
        projection = self.embed_vision["embedding_projection"]
        yield projected(state.astype(mx.float32), projection, sizes.eps, state.dtype)
