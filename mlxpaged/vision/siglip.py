"""SigLIP's vision tower without its positions (arXiv 2303.15343): in Gemma 3, and as SigLIP 2 in LFM2-VL.

The modules have the names of the checkpoints (SiglipVisionModel and Siglip2VisionModel of transformers).
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.vision.blocks import Parts, join, parts_of_block, separate
from mlxpaged.vision.patches import CHANNELS, Rotation


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

    def __init__(self, width: int, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = heads
        self.layer_norm1 = LayerNorm(width, eps)
        self.self_attn = Attention(width)
        self.layer_norm2 = LayerNorm(width, eps)
        self.mlp = FeedForward(width, hidden)

    def heads(self, x: mx.array, rotation: Rotation) -> mx.array:
        x, own = self.layer_norm1(x), self.self_attn
        return mx.stack([separate(layer(x), self.num_heads) for layer in (own.q_proj, own.k_proj, own.v_proj)])

    def rest(self, x: mx.array, mixed: mx.array) -> mx.array:
        x = x + self.self_attn.out_proj(join(mixed))
        return x + self.mlp(self.layer_norm2(x))


class VisionTower(Module):
    """The embedding of the patches, the blocks, and the norm after them. places: that have embeddings. Other sizes: see
    the towers that have one."""

    def __init__(self, width: int, hidden: int, blocks: int, heads: int, patch: int, places: int, eps: float) -> None:
        super().__init__()
        self.num_places = places
        # A convolution by steps of its own width is a linear layer of whole patches.
        self.embeddings = {
            "patch_embedding": Linear(patch**2 * CHANNELS, width),
            "position_embedding": Embedding(places, width),
        }
        self.encoder = {"layers": [Block(width, hidden, heads, eps) for _ in range(blocks)]}
        self.post_layernorm = LayerNorm(width, eps)

    @property
    def places(self) -> mx.array:
        """[places, width], their embeddings, which may be quantized in a checkpoint."""
        out: mx.array = self.embeddings["position_embedding"](mx.arange(self.num_places))
        return out

    def encode(self, patches: mx.array, positions: mx.array) -> Parts:
        """patches: [n, rows, columns, colours]. positions: their embeddings [rows, columns, width]. Returns
        [n, rows * columns, width]."""
        embedded = self.embeddings["patch_embedding"](patches.astype(self.post_layernorm.weight.dtype))
        state = (embedded + positions.astype(embedded.dtype)).flatten(1, 2)
        unused = mx.zeros(0)
        for block in self.encoder["layers"]:
            state = yield from parts_of_block(block, state, Rotation(unused, unused))
        out: mx.array = self.post_layernorm(state)
        return out
