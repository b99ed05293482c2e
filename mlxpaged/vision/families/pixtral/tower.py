"""The vision tower of Pixtral and Mistral 3, and their projectors.

The modules have the names of the checkpoints. Positions follow PixtralVisionModel of transformers: of the pairs of
values of a head, those at even places turn with the row of a patch, those at odd places with its column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.activations import gelu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from mlxpaged.vision.blocks import join, parts_of_block, separate
from mlxpaged.vision.patches import CHANNELS, Rotation, angles_of, frequencies_of, patches_of
from mlxpaged.vision.tower import Tower

NORM_EPS = 1e-5
"""The same in all norms of the tower; no config.json has it."""

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Red, green and blue in the images that CLIP was trained on. Pixtral's preprocessor_config.json has these values."""

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {"gelu": gelu, "silu": silu}


@dataclass(frozen=True)
class PixtralSizes:
    """What a tower is built by.

    width: of its blocks. hidden: of their feed-forward layers. patch: side in pixels. merge: each square of
    merge x merge patches becomes one row of features; None if the projector has no merger. output: width of the text
    model's embeddings. bias: whether the projector's layers have one. merger_eps: of the norm before the merger.
    mean, std: of the pixels' colours, from 0 to 1.
    """

    width: int
    hidden: int
    blocks: int
    heads: int
    patch: int
    rope_base: float
    activation: str
    merge: int | None
    output: int
    projector_activation: str
    bias: bool
    merger_eps: float
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


class Attention(Module):
    """Its weights. `Block` computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = Linear(width, width, bias=False)
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width, bias=False)
        self.o_proj = Linear(width, width, bias=False)


class FeedForward(Module):
    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = Linear(width, hidden, bias=False)
        self.up_proj = Linear(width, hidden, bias=False)
        self.down_proj = Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(Module):
    """A `blocks.Block`."""

    def __init__(self, sizes: PixtralSizes) -> None:
        super().__init__()
        self.num_heads = sizes.heads
        self.attention_norm = RMSNorm(sizes.width, NORM_EPS)
        self.attention = Attention(sizes.width)
        self.ffn_norm = RMSNorm(sizes.width, NORM_EPS)
        self.feed_forward = FeedForward(sizes.width, sizes.hidden, sizes.activation)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        x, own = self.attention_norm(x), self.attention
        q, k, v = (separate(layer(x), self.num_heads) for layer in (own.q_proj, own.k_proj, own.v_proj))
        return mx.stack([rotation(q), rotation(k), v])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.attention.o_proj(join(mixed))
        return x + self.feed_forward(self.ffn_norm(x))


class VisionTower(Module):
    """The embedding of the patches, and the blocks."""

    def __init__(self, sizes: PixtralSizes) -> None:
        super().__init__()
        # A convolution by steps of its own width is a linear layer of whole patches.
        self.patch_conv = Linear(sizes.patch**2 * CHANNELS, sizes.width, bias=False)
        self.ln_pre = RMSNorm(sizes.width, NORM_EPS)
        self.transformer = {"layers": [Block(sizes) for _ in range(sizes.blocks)]}


class Projector(Module):
    """From the tower's width to the text model's."""

    def __init__(self, sizes: PixtralSizes) -> None:
        super().__init__()
        self.merge = sizes.merge
        self.activation = ACTIVATIONS[sizes.projector_activation]
        if sizes.merge is not None:
            self.norm = RMSNorm(sizes.width, sizes.merger_eps)
            self.patch_merger = {"merging_layer": Linear(sizes.merge**2 * sizes.width, sizes.width, bias=False)}
        self.linear_1 = Linear(sizes.width, sizes.output, bias=sizes.bias)
        self.linear_2 = Linear(sizes.output, sizes.output, bias=sizes.bias)

    def __call__(self, x: mx.array, rows: int, columns: int) -> mx.array:
        """x: [images, rows * columns, width]."""
        if self.merge is not None:
            squares = (rows // self.merge, self.merge, columns // self.merge, self.merge)
            x = self.norm(x).reshape(len(x), *squares, -1).transpose(0, 1, 3, 5, 2, 4)
            x = self.patch_merger["merging_layer"](x.reshape(len(x), squares[0] * squares[2], -1))
        out: mx.array = self.linear_2(self.activation(self.linear_1(x)))
        return out


class PixtralTower(Tower):
    """The sides of its images are multiples of the patches' side, times `merge`."""

    def __init__(self, sizes: PixtralSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision_tower = VisionTower(sizes)
        self.multi_modal_projector = Projector(sizes)

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        rows, columns = (size // self.sizes.patch for size in pixels.shape[1:3])
        state = self._embedded(pixels)
        rotation = self._rotation(rows, columns, state.dtype)
        for block in self.vision_tower.transformer["layers"]:
            state = yield from parts_of_block(block, state, rotation)
        yield self.multi_modal_projector(state, rows, columns)

    def _embedded(self, pixels: mx.array) -> mx.array:
        tower = self.vision_tower
        patches = patches_of(pixels, self.sizes.patch, self.sizes.mean, self.sizes.std).flatten(1, 2)
        embedded: mx.array = tower.ln_pre(tower.patch_conv(patches.astype(tower.ln_pre.weight.dtype)))
        return embedded

    def _rotation(self, rows: int, columns: int, dtype: mx.Dtype) -> Rotation:
        frequencies = frequencies_of(self.sizes.width // self.sizes.heads, self.sizes.rope_base)
        angles = angles_of(rows, columns, frequencies[0::2], frequencies[1::2]).flatten(0, 1)
        return Rotation(mx.cos(angles).astype(dtype), mx.sin(angles).astype(dtype))
