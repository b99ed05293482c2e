"""Products of a few rows with a large float32 matrix, in tiles of outputs.

OpenBLAS copies (packs) both matrices of a product before it multiplies. For one to eight rows, that takes more time
than the product. Its routines for AVX-512 leave it out for small products only, so a large one is computed as a batch
of small ones, whose matrices are views of the large one's rows. One row with 24,576 x 576 weights takes 2.0 ms instead
of 6.9, with 4,096 x 2,048 weights 1.2 ms instead of 3.8; four rows take 3.0 instead of 7.0 and 1.7 instead of 3.7 (one
core of an AMD EPYC, OpenBLAS 0.3.21 for Cooper Lake).
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from mlxpaged.cpu import blas

TILE = 32
"""Outputs of a small product. 64 are a few per cent faster, for half as many rows."""

MAX_MULTIPLY_ADDS, MAX_RESULTS = 10**6, 1200
"""Sizes of a product that is not packed (OpenBLAS, kernel/x86_64/sgemm_small_kernel_permit_skylakex.c, with the weights
transposed)."""


class LinearInTiles(Linear):
    """A linear layer whose product of a few rows is a batch of small products."""

    def __call__(self, x: mx.array) -> mx.array:
        out = product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


class HeadInTiles(Embedding):
    """An embedding that is also the output head, with such products."""

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self["weight"])


FORMS: dict[type, type] = {Linear: LinearInTiles, Embedding: HeadInTiles}


def takes(weight: mx.array) -> bool:
    """Whether one row's product with this matrix, [outputs, inputs], is faster in tiles."""
    return bool(
        blas.small_products and weight.dtype == mx.float32 and weight.ndim == 2 and weight.size > MAX_MULTIPLY_ADDS
    )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T. [..., inputs], [outputs, inputs] -> [..., outputs]"""
    outputs, inputs = weight.shape
    rows = x.size // inputs
    if not 0 < rows <= min(MAX_RESULTS // TILE, MAX_MULTIPLY_ADDS // (TILE * inputs)):
        return x @ weight.T
    whole = outputs - outputs % TILE
    tiles, by_row = weight[:whole].reshape(-1, TILE, inputs), x.reshape(rows, inputs)
    out = (by_row @ tiles.swapaxes(1, 2)).swapaxes(0, 1).reshape(rows, whole)
    if whole < outputs:
        out = mx.concatenate([out, by_row @ weight[whole:].T], axis=-1)
    return out.reshape(*x.shape[:-1], outputs)
