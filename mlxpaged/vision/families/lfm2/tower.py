"""The vision tower of LFM2-VL, which is a SigLIP 2 for images of any size, and its projector.

The modules have the names of the checkpoints. Positions follow Siglip2VisionModel of transformers: an embedding for a
grid of a fixed side, interpolated to the image's. There is no rotation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from mlxpaged.vision.blocks import Parts
from mlxpaged.vision.families.lfm2.format import Lfm2Format
from mlxpaged.vision.interpolation import bilinear, interpolated, resized_part
from mlxpaged.vision.patches import in_squares, patches_of
from mlxpaged.vision.siglip import VisionTower
from mlxpaged.vision.tower import Tower

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


class Lfm2Tower(Tower):
    """The sides of its images are multiples of patch * merge. form: says which images are split, whose sides are any.
    None if none is."""

    def __init__(self, sizes: Lfm2Sizes, form: Lfm2Format | None = None) -> None:
        super().__init__()
        self.sizes, self.form = sizes, form
        self.vision_tower = VisionTower(
            *(sizes.width, sizes.hidden, sizes.blocks, sizes.heads, sizes.patch, sizes.places**2, sizes.eps)
        )
        self.multi_modal_projector = Projector(sizes)

    def load_weights(self, file_or_weights: str | list[tuple[str, mx.array]], strict: bool = True) -> Module:
        """Leaves out the projector's norm if the configuration turns it off: some checkpoints have its weights."""
        if not self.sizes.norm and not isinstance(file_or_weights, str):
            norm = "multi_modal_projector.layer_norm."
            file_or_weights = [(name, array) for name, array in file_or_weights if not name.startswith(norm)]
        loaded: Module = super().load_weights(file_or_weights, strict)
        return loaded

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        features = []
        for view in self._views(pixels):
            if view is not pixels:
                yield view
            features.append((yield from self._features(view)))
            yield features[-1]
        if len(features) > 1:
            yield mx.concatenate(features, axis=1)

    def _views(self, pixels: mx.array) -> Iterator[mx.array]:
        """Yields what is encoded of images: their tiles, row by row, and the thumbnails, or the images themselves."""
        height, width = pixels.shape[1:3]
        form = self.form
        split = None if form is None else form.split(width, height)
        if form is None or form.tiles is None or split is None:
            yield pixels
            return
        side = form.tiles.side
        below, right = (side * count for count in split)
        for top, left in itertools.product(range(0, below, side), range(0, right, side)):
            yield resized_part(pixels, below, right, slice(top, top + side), slice(left, left + side))
        if form.tiles.thumbnail:
            right, below = form.whole_size(width, height)
            yield resized_part(pixels, below, right, slice(0, below), slice(0, right))

    def _features(self, pixels: mx.array) -> Parts:
        sizes, tower = self.sizes, self.vision_tower
        patches = patches_of(pixels, sizes.patch, sizes.mean, sizes.std)
        rows, columns = patches.shape[1:3]
        grid = tower.places.reshape(sizes.places, sizes.places, -1)
        places = interpolated(grid, bilinear(rows, sizes.places), bilinear(columns, sizes.places))
        state = yield from tower.encode(patches, places)
        squares = in_squares(state.reshape(len(state), rows, columns, -1), sizes.merge)
        out: mx.array = self.multi_modal_projector(squares.reshape(len(state), -1, sizes.merge**2 * sizes.width))
        return out
