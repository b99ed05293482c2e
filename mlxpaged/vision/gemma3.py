"""The vision tower of Gemma 3, which is SigLIP's, and its projector.

The modules have the names of the checkpoints. All pictures have one size, and each patch of it an embedding of its
place (SiglipVisionModel and Gemma3MultiModalProjector of transformers). The text model multiplies its embeddings by a
number, features included. The features are divided by it, since the projector has made them to its measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.utils import tree_flatten

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.patches import CHANNELS, Rotation, in_squares, patches_of

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Gemma3Sizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. patches: rows and columns of a
    picture. pool: each square of pool x pool patches becomes one row of features. eps: of all norms. output: width of
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


class Attention(Module):
    """Its weights. `Block` computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.out_proj = Linear(width, width)


class FeedForward(Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc2(gelu_approx(self.fc1(x)))
        return out


class Block(Module):
    """A `blocks.Block`. It rotates nothing."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.heads
        self.layer_norm1 = LayerNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes.width)
        self.layer_norm2 = LayerNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes.width, sizes.hidden)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        x, own = self.layer_norm1(x), self.self_attn
        return mx.stack([separate(layer(x), self.num_heads) for layer in (own.q_proj, own.k_proj, own.v_proj)])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.self_attn.out_proj(join(mixed))
        return x + self.mlp(self.layer_norm2(x))


class VisionTower(Module):
    """The embedding of the patches, the blocks, and the norm after them."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        # A convolution by steps of its own width is a linear layer of whole patches.
        self.embeddings = {
            "patch_embedding": Linear(sizes.patch**2 * CHANNELS, sizes.width),
            "position_embedding": Embedding(sizes.patches**2, sizes.width),
        }
        self.encoder = {"layers": [Block(sizes) for _ in range(sizes.blocks)]}
        self.post_layernorm = LayerNorm(sizes.width, sizes.eps)


class Projector(Module):
    """From squares of patches to the text model's width."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        self.pool, self.eps = sizes.pool, sizes.eps
        self.mm_soft_emb_norm = {"weight": mx.zeros(sizes.width)}
        self.mm_input_projection_weight = mx.zeros((sizes.width, sizes.output))

    def __call__(self, x: mx.array, patches: int) -> mx.array:
        """x: [pictures, patches * patches, width], row by row. Each square's mean goes through the norm, which
        multiplies by 1 + its weight."""
        squares = in_squares(x.reshape(len(x), patches, patches, -1), self.pool)
        pooled = squares.reshape(len(x), -1, self.pool**2, x.shape[-1]).astype(mx.float32).mean(axis=2)
        normed = mx.fast.rms_norm(pooled, 1 + self.mm_soft_emb_norm["weight"].astype(mx.float32), self.eps)
        projection = self.mm_input_projection_weight
        # Divided before the projection, so that the features are rounded once.
        return (normed / factor_of_text(projection.shape[1])).astype(projection.dtype) @ projection


def factor_of_text(width: int) -> mx.array:
    """Returns the number by which the text model multiplies embeddings: it is rounded to bfloat16 whatever their type
    (mlx_lm/models/gemma3_text.py)."""
    return mx.array(width**0.5, mx.bfloat16).astype(mx.float32)


class Gemma3Tower(Module):
    """A `Tower`. All of its pictures are squares of patches * patch pixels."""

    def __init__(self, sizes: Gemma3Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(sizes)
        self.multi_modal_projector = Projector(sizes)

    @property
    def nbytes(self) -> int:
        weights: Any = tree_flatten(self.parameters())
        return sum(array.nbytes for _, array in weights)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        tower, state = self.vision_tower, self._embedded(pixels)
        unrotated = Rotation.of(mx.zeros((state.shape[1], 0)))
        for block in tower.encoder["layers"]:
            state = yield from parts_of_block(block, state, unrotated)
        yield self.multi_modal_projector(tower.post_layernorm(state), self.sizes.patches)

    def _embedded(self, pixels: mx.array) -> mx.array:
        tower = self.vision_tower
        patches = patches_of(pixels, self.sizes.patch, self.sizes.mean, self.sizes.std).flatten(1, 2)
        embedded = tower.embeddings["patch_embedding"](patches.astype(tower.post_layernorm.weight.dtype))
        out: mx.array = embedded + tower.embeddings["position_embedding"](mx.arange(patches.shape[1]))
        return out
