"""Products of float32 matrices with a few rows, in the order in which OpenBLAS is fastest.

OpenBLAS copies (packs) both matrices of a product before it multiplies. It packs one of them in pieces that it uses at
once, from the cache. MLX's `weight @ x.T` makes that the weights, `x @ weight.T` the inputs. The routines for AVX-512
do not pack small products, so a few rows are multiplied by tiles of the weights, in a batch of small products.

GFLOP/s of one core (Xeon, OpenBLAS 0.3.21 for Cooper Lake), 576 inputs and 768 outputs, by `x @ weight.T`, by
`weight @ x.T`, and by tiles: 4 rows 23, 31 and 69; 16 rows 73, 101 and 114; 48 rows 134, 155 and 101; 145 rows 174, 174
and 113.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from mlxpaged.cpu import blas

TILE = 32
"""Outputs of a small product."""

MAX_MULTIPLY_ADDS = 10**6
"""The most in a product that is not packed (OpenBLAS, kernel/x86_64/sgemm_small_kernel_permit_skylakex.c)."""

LEAST_PACKED = 20
"""Rows from which packing takes less time than tiles lose. 24 rows: tiles 84 GFLOP/s, the whole matrix 92."""

MAX_ROWS = 128
"""With more, the outputs are not transposed: their copy takes longer than the order gains."""


class WeightFirstLinear(Linear):
    """A linear layer that computes `weight @ x.T`. Its outputs may be a transposed view."""

    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


class WeightFirstHead(Embedding):
    """An embedding that is also the output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self["weight"])


def product(x: mx.array, weight: mx.array) -> mx.array:
    """[..., inputs], [outputs, inputs] -> [..., outputs]"""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    if is_in_tiles(len(rows), outputs, inputs):
        tiles = weight.reshape(-1, TILE, inputs).swapaxes(1, 2)
        out = (rows @ tiles).swapaxes(0, 1)
    elif 0 < len(rows) <= MAX_ROWS:
        out = (weight @ rows.T).T
    else:
        out = rows @ weight.T
    return out.reshape(*x.shape[:-1], outputs)


def is_in_tiles(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the product is packed as a whole, and is not in tiles."""
    if not blas.small_products or rows >= LEAST_PACKED or outputs % TILE:
        return False
    return rows * inputs * TILE <= MAX_MULTIPLY_ADDS < rows * inputs * outputs


def store_for_products(layer: Any) -> None:
    """Let a float32 linear layer, or an embedding that may be a head, compute its products so. Its weight stays."""
    if type(layer) in KINDS and layer.weight.dtype == mx.float32:
        layer.__class__ = KINDS[type(layer)]


KINDS: dict[type, type] = {Linear: WeightFirstLinear, Embedding: WeightFirstHead}
