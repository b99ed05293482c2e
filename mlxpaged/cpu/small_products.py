"""Linear layers that store a float32 matrix as OpenBLAS multiplies by it fastest: in tiles, or transposed.

OpenBLAS copies (packs) both matrices of a product before it multiplies: for up to a hundred rows, that takes longer
than what it saves. Its routines for AVX-512 leave it out for small products, so a large one is computed as a batch of
small ones, each with a tile of the outputs that is stored in one piece. Microseconds of one core for rows with 768 x
576 weights, before and after (AMD EPYC, OpenBLAS 0.3.21 for Cooper Lake): one row 137 and 90, 4 rows 205 and 81, 16
rows 298 and 165, 48 rows 569 and 444. With more rows, both take 10 for each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from mlxpaged.cpu import blas

TILE = 32
"""Outputs of a tile. 64 are up to a quarter faster for four rows, and equal for others."""

MAX_MULTIPLY_ADDS = 10**6
"""The most in a product that is not packed (OpenBLAS, kernel/x86_64/sgemm_small_kernel_permit_skylakex.c)."""

FEWEST_PADDED = 8 * TILE
"""Outputs from which a last tile is filled up with zeros."""

MAX_ROWS = 256
"""More are multiplied with the whole matrix: a copy of it takes less time than they gain."""


class TransposedLinear(Linear):
    """A linear layer with its matrix as `columns`, [inputs, outputs]. `weight` is still [outputs, inputs]."""

    columns: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = x @ self["columns"]
        return out + self["bias"] if "bias" in self else out

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        return self.columns.T

    def __setattr__(self, name: str, value: Any) -> None:
        """A model may assign the weight in every call (Gemma 3n)."""
        super().__setattr__(*(("columns", mx.contiguous(value.T)) if name == "weight" else (name, value)))


class LinearInTiles(Linear):
    """A linear layer with its matrix as `tiles`, [tile, inputs, outputs of a tile]. `weight` is still [outputs,
    inputs]."""

    tiles: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, self["tiles"])
        return out + self["bias"] if "bias" in self else out

    def by_tile(self, x: mx.array) -> mx.array:
        """[rows, inputs] -> [tile, rows, outputs of a tile], for rows that `are_few`"""
        out = x @ self.tiles
        return out + self["bias"].reshape(len(out), 1, -1) if "bias" in self else out

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        return whole(self.tiles)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(*(("tiles", in_tiles(value)) if name == "weight" else (name, value)))


class LinearByTile(LinearInTiles):
    """A layer before an activation, with outputs by tile for a few rows, [rows, inputs] -> [tile, rows, outputs of a
    tile]. What works on single elements takes them so, and `LinearOfTiles` puts them together: one copy less."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.by_tile(x) if x.ndim == 2 and are_few([self], len(x)) else super().__call__(x)


class LinearOfTiles(LinearInTiles):
    """The layer after it: [tile, rows, inputs of a tile] or [..., inputs] -> [..., outputs]"""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x if x.shape[-1] == self.tiles.shape[1] else merged([x]))


class PaddedLinear(LinearInTiles):
    """A layer whose last tile ends with outputs that are always 0. It is joined with no others."""

    outputs: int

    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, self["tiles"])[..., : self.outputs]
        return out + self["bias"] if "bias" in self else out

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        return whole(self.tiles)[: self.outputs]


class HeadInTiles(Embedding):
    """An embedding that is also the output head, with its rows as the outputs of `tiles`."""

    tiles: mx.array
    outputs: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.tiles[x // TILE, :, x % TILE]

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self.tiles)[..., : self.outputs]

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        return whole(self.tiles)[: self.outputs]

    def part(self, outputs: slice) -> HeadInTiles:
        """A view of some of its rows. The slice begins at a tile."""
        part = copy.copy(self)
        part.tiles = self.tiles[outputs.start // TILE : -(-outputs.stop // TILE)]
        part.outputs = outputs.stop - outputs.start
        return part


def in_tiles(weight: mx.array) -> mx.array:
    """[outputs, inputs] -> [tile, inputs, outputs of a tile], the last tile with zeros at its end"""
    outputs, inputs = weight.shape
    if missing := -outputs % TILE:
        weight = mx.concatenate([weight, mx.zeros((missing, inputs), weight.dtype)])
    return mx.contiguous(weight.reshape(-1, TILE, inputs).swapaxes(1, 2))


def whole(tiles: mx.array) -> mx.array:
    """The matrix that `in_tiles` got, with the zeros that it has added."""
    return tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1])


def product(x: mx.array, tiles: mx.array) -> mx.array:
    """[..., inputs], [tile, inputs, outputs of a tile] -> [..., outputs]"""
    number, inputs, size = tiles.shape
    rows = x.size // inputs
    by_row = x.reshape(rows, inputs)
    most = MAX_MULTIPLY_ADDS // (size * inputs)
    if not most or not 0 < rows <= MAX_ROWS:
        out = by_row @ tiles.swapaxes(0, 1).reshape(inputs, number * size)
    elif rows <= most:
        out = merged([by_row @ tiles])
    else:
        each = -(-rows // -(-rows // most))  # rows of a product: equal ones, but for the last
        last = rows - rows % each
        products = by_row[:last].reshape(1, -1, each, inputs) @ tiles[:, None]
        out = products.transpose(1, 2, 0, 3).reshape(last, number * size)
        if last < rows:
            out = mx.concatenate([out, merged([by_row[last:] @ tiles])])
    return out.reshape(*x.shape[:-1], number * size)


def merged(outputs: Sequence[mx.array]) -> mx.array:
    """Outputs of layers by tile, [tile, rows, outputs of a tile], side by side: [rows, outputs]"""
    whole = mx.concatenate(list(outputs)) if len(outputs) > 1 else outputs[0]
    return whole.swapaxes(0, 1).reshape(whole.shape[1], -1)


def are_few(layers: Sequence[Any], rows: int) -> bool:
    """Whether all of these layers have tiles, all full, whose products of so many rows are not packed."""
    return all(
        isinstance(layer, LinearInTiles)
        and not isinstance(layer, PaddedLinear)
        and 0 < rows * layer.tiles.shape[1] * TILE <= MAX_MULTIPLY_ADDS
        for layer in layers
    )


def pass_tiles(network: Any, keep: bool) -> None:
    """Let the layers of a feed-forward network pass what is between them by tile, or whole."""
    layers = network.gate_proj, network.up_proj, network.down_proj
    if keep and not all(type(layer) is LinearInTiles for layer in layers):
        return
    kinds = (LinearByTile, LinearByTile, LinearOfTiles) if keep else (LinearInTiles,) * 3
    for layer, kind in zip(layers, kinds, strict=True):
        if type(layer) in (LinearInTiles, LinearByTile, LinearOfTiles):  # none with adapters
            layer.__class__ = kind


def store_for_products(layer: Any) -> None:
    """Change a float32 linear layer, or an embedding that gains by it as a head, in place."""
    if type(layer) not in (Linear, Embedding) or layer.weight.dtype != mx.float32:
        return
    outputs, inputs = layer.weight.shape
    if type(layer) is Embedding:
        if not blas.small_products or outputs * inputs <= MAX_MULTIPLY_ADDS:
            return
        kind: type = HeadInTiles
    elif not blas.small_products or outputs <= TILE or (outputs % TILE and outputs < FEWEST_PADDED):
        kind = TransposedLinear
    else:
        kind = PaddedLinear if outputs % TILE else LinearInTiles
    weight = layer.weight
    del layer["weight"]
    layer.__class__ = kind
    if kind is TransposedLinear:
        layer.columns = mx.contiguous(weight.T)
    else:
        layer.tiles = in_tiles(weight)
        if kind is not LinearInTiles:
            layer.outputs = outputs
    mx.eval(layer.parameters())
