"""The vision tower of LFM2-VL, which is a SigLIP 2 for pictures of any size, and its projector.

The modules have the names of the checkpoints. Positions follow Siglip2VisionModel of transformers: an embedding for a
grid of a fixed side, interpolated to the picture's. There is no rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.utils import tree_flatten

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.interpolation import bilinear, interpolated
from mlxpaged.vision.patches import CHANNELS, Rotation, in_squares, patches_of

PROJECTOR_EPS = 1e-5
"""No config.json has it."""

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Lfm2Sizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. places: side of the grid that has
    embeddings. eps: of the norms. merge: each square of merge x merge patches becomes one row of features. projector:
    width of the projector's inner layer. bias, norm: whether the projector has them. output: width of the text model's
    embeddings. mean, std: of the pixels' colours, from 0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    places: int
    eps: float
    merge: int
    projector: int
    bias: bool
    norm: bool
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
    """A `blocks.Block`."""

    def __init__(self, sizes: Lfm2Sizes) -> None:
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

    def __init__(self, sizes: Lfm2Sizes) -> None:
        super().__init__()
        self.embeddings = {
            "patch_embedding": Linear(sizes.patch**2 * CHANNELS, sizes.width),
            "position_embedding": Embedding(sizes.places**2, sizes.width),
        }
        self.encoder = {"layers": [Block(sizes) for _ in range(sizes.blocks)]}
        self.post_layernorm = LayerNorm(sizes.width, sizes.eps)


class Projector(Module):
    """From squares of patches to the text model's width."""

    def __init__(self, sizes: Lfm2Sizes) -> None:
        super().__init__()
        square = sizes.merge**2 * sizes.width
        self.has_norm = sizes.norm
        if sizes.norm:
            self.layer_norm = LayerNorm(square, PROJECTOR_EPS)
        self.linear_1 = Linear(square, sizes.projector, bias=sizes.bias)
        self.linear_2 = Linear(sizes.projector, sizes.output, bias=sizes.bias)

    def __call__(self, x: mx.array) -> mx.array:
        if self.has_norm:
            x = self.layer_norm(x)
        out: mx.array = self.linear_2(gelu(self.linear_1(x)))
        return out


class Lfm2Tower(Module):
    """A `Tower`. The sides of its pictures are multiples of patch * merge."""

    def __init__(self, sizes: Lfm2Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(sizes)
        self.multi_modal_projector = Projector(sizes)

    @property
    def nbytes(self) -> int:
        weights: Any = tree_flatten(self.parameters())
        return sum(array.nbytes for _, array in weights)

    def load_weights(self, file_or_weights: str | list[tuple[str, mx.array]], strict: bool = True) -> Module:
        """Leaves out the projector's norm if the configuration turns it off: some checkpoints have its weights."""
        if not self.sizes.norm and not isinstance(file_or_weights, str):
            norm = "multi_modal_projector.layer_norm."
            file_or_weights = [(name, array) for name, array in file_or_weights if not name.startswith(norm)]
        loaded: Module = super().load_weights(file_or_weights, strict)
        return loaded

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        rows, columns = (size // self.sizes.patch for size in pixels.shape[1:3])
        state = self._embedded(pixels, rows, columns)
        unused = mx.zeros(0)
        for block in self.vision_tower.encoder["layers"]:
            state = yield from parts_of_block(block, state, Rotation(unused, unused))
        grid = self.vision_tower.post_layernorm(state).reshape(len(state), rows, columns, -1)
        square = self.sizes.merge**2 * self.sizes.width
        yield self.multi_modal_projector(in_squares(grid, self.sizes.merge).reshape(len(state), -1, square))

    def _embedded(self, pixels: mx.array, rows: int, columns: int) -> mx.array:
        parts: Any = self.vision_tower.embeddings
        side = self.sizes.places
        dtype = self.vision_tower.post_layernorm.weight.dtype
        patches = patches_of(pixels, self.sizes.patch, self.sizes.mean, self.sizes.std)
        grid = parts["position_embedding"](mx.arange(side**2)).reshape(side, side, -1)
        places = interpolated(grid, bilinear(rows, side), bilinear(columns, side))
        embedded: mx.array = parts["patch_embedding"](patches.astype(dtype)) + places.astype(dtype)
        return embedded.flatten(1, 2)
