"""The vision tower of Gemma 4, and its projector.

The modules have the names of the checkpoints. A patch has an embedding of its row and one of its column. Half of each
head turns with the column, the other with the row (Gemma4VisionModel of transformers). Squares of patches are averaged
after the blocks. The text model multiplies its embeddings by a number, features included: they are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, frequencies_of, in_squares, patches_of
from mlxpaged.vision.tower import Tower

MEAN = STD = (0.5, 0.5, 0.5)
"""The tower takes colours from -1 to 1."""


@dataclass(frozen=True)
class Gemma4Sizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. head: elements of a head. patch: side in pixels.
    places: rows and columns that have embeddings. pool: each square of pool x pool patches becomes one row of features.
    eps: of all norms. clipped: whether the layers of the blocks have bounds for what goes in and out. standardized:
    whether features are shifted and scaled before the projector. output: width of the text model's embeddings. mean,
    std: of the pixels' colours, from 0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    head: int
    patch: int
    places: int
    pool: int
    rope_base: float
    eps: float
    clipped: bool
    standardized: bool
    output: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class BoundedLinear(Module):
    """A linear layer, with bounds for its input and output if it is clipped."""

    def __init__(self, inputs: int, outputs: int, clipped: bool) -> None:
        super().__init__()
        self.clipped = clipped
        self.linear = Linear(inputs, outputs, bias=False)
        if clipped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if not self.clipped:
            out: mx.array = self.linear(x)
            return out
        y = self.linear(mx.clip(x, self.input_min.astype(x.dtype), self.input_max.astype(x.dtype)))
        return mx.clip(y, self.output_min.astype(y.dtype), self.output_max.astype(y.dtype))


class Attention(Module):
    """Its weights. `Block` computes it."""

    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head
        self.q_proj = BoundedLinear(sizes.width, inner, sizes.clipped)
        self.k_proj = BoundedLinear(sizes.width, inner, sizes.clipped)
        self.v_proj = BoundedLinear(sizes.width, inner, sizes.clipped)
        self.o_proj = BoundedLinear(inner, sizes.width, sizes.clipped)
        self.q_norm = RMSNorm(sizes.head, sizes.eps)
        self.k_norm = RMSNorm(sizes.head, sizes.eps)


class FeedForward(Module):
    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        self.gate_proj = BoundedLinear(sizes.width, sizes.hidden, sizes.clipped)
        self.up_proj = BoundedLinear(sizes.width, sizes.hidden, sizes.clipped)
        self.down_proj = BoundedLinear(sizes.hidden, sizes.width, sizes.clipped)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(gelu_approx(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(Module):
    """A `blocks.Block`. Its scores are not divided by the root of a head's size, as `attend` divides them: so the
    queries are multiplied by it."""

    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        self.num_heads, self.eps, self.root = sizes.heads, sizes.eps, sizes.head**0.5
        self.input_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.pre_feedforward_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.mlp = FeedForward(sizes)
        self.post_feedforward_layernorm = RMSNorm(sizes.width, sizes.eps)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        x, own = self.input_layernorm(x), self.self_attn
        q, k, v = (separate(layer(x), self.num_heads) for layer in (own.q_proj, own.k_proj, own.v_proj))
        q = self.root * own.q_norm(q).astype(mx.float32)
        q, k = turned(q, rotation).astype(x.dtype), turned(own.k_norm(k), rotation)
        return mx.stack([q, k, mx.fast.rms_norm(v, None, self.eps)])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(join(mixed)))
        out: mx.array = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return out


def turned(heads: mx.array, rotation: Rotation) -> mx.array:
    """heads: [n, heads, patches, D]. Each half of a head turns as a head of its own."""
    return rotation(heads.reshape(*heads.shape[:-1], 2, -1)).reshape(heads.shape)


class PatchEmbedder(Module):
    """position_embedding_table: [2, places, width], of columns and of rows."""

    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        self.input_proj = Linear(sizes.patch**2 * CHANNELS, sizes.width, bias=False)
        self.position_embedding_table = mx.zeros((2, sizes.places, sizes.width))

    def __call__(self, patches: mx.array) -> mx.array:
        """patches: [n, rows, columns, colours]. Returns [n, rows, columns, width]."""
        of_columns, of_rows = self.position_embedding_table
        places = of_rows[: patches.shape[1], None] + of_columns[: patches.shape[2]]
        embedded: mx.array = self.input_proj(patches.astype(places.dtype))
        return embedded + places


class VisionTower(Module):
    """The embedding of the patches, the blocks, and what standardizes their output."""

    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        self.patch_embedder = PatchEmbedder(sizes)
        self.encoder = {"layers": [Block(sizes) for _ in range(sizes.blocks)]}
        if sizes.standardized:
            self.std_bias = mx.zeros(sizes.width)
            self.std_scale = mx.ones(sizes.width)


class Gemma4Tower(Tower):
    """The sides of its images are multiples of patch * pool."""

    def __init__(self, sizes: Gemma4Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(sizes)
        self.embed_vision = {"embedding_projection": Linear(sizes.width, sizes.output, bias=False)}

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        sizes, tower = self.sizes, self.vision_tower
        state = tower.patch_embedder(patches_of(pixels, sizes.patch, sizes.mean, sizes.std))
        rows, columns = state.shape[1:3]
        state, rotation = state.flatten(1, 2), self._rotation(rows, columns)
        for block in tower.encoder["layers"]:
            state = yield from parts_of_block(block, state, rotation)
        yield self._projected(state, rows, columns)

    def _rotation(self, rows: int, columns: int) -> Rotation:
        """The angles [patches, 2, frequencies] of columns and of rows."""
        frequencies = frequencies_of(self.sizes.head // 2, self.sizes.rope_base)
        angles = angles_of(rows, columns, frequencies, frequencies).reshape(rows * columns, 2, -1)
        return Rotation.of(angles[:, ::-1])

    def _projected(self, state: mx.array, rows: int, columns: int) -> mx.array:
        sizes, tower, dtype = self.sizes, self.vision_tower, state.dtype
        squares = in_squares(state.reshape(len(state), rows, columns, -1), sizes.pool)
        x = squares.reshape(len(state), -1, sizes.pool**2, sizes.width).astype(mx.float32).mean(axis=2)
        x = x * sizes.width**0.5
        if sizes.standardized:
            x = (x - tower.std_bias.astype(mx.float32)) * tower.std_scale.astype(mx.float32)
        return projected(x, self.embed_vision["embedding_projection"], sizes.eps, dtype)


def projected(x: mx.array, projection: Linear, eps: float, dtype: mx.Dtype) -> mx.array:
    """The features for the text model, which multiplies embeddings by the root of their width, rounded to their type
    (mlx_lm/models/gemma4_text.py). x: [..., width] in float32."""
    normed = mx.fast.rms_norm(x, None, eps)
    factor = mx.array(projection.weight.shape[0] ** 0.5).astype(dtype).astype(mx.float32)
    # Divided before the projection, so that the features are rounded once.
    out: mx.array = projection((normed / factor).astype(dtype))
    return out
