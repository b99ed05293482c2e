"""Attention among the patches of an image."""

from __future__ import annotations

import mlx.core as mx

FUSED_SIZES = (64, 80, 128)
"""Elements of a head for which MLX's attention keeps no scores of a whole image on a GPU
(mlx/backend/metal/scaled_dot_product_attention.cpp)."""

QUERIES = 512
"""Otherwise so many patches attend at once: 4,096 patches of 16 heads have 1 GB of scores in float32, these 128 MB."""


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Every patch to every other one: [n, heads, patches, D] each, and the result."""
    size = queries.shape[-1]
    step = queries.shape[2]
    if size not in FUSED_SIZES or mx.default_device() == mx.Device(mx.cpu):
        step = QUERIES
    parts = [
        mx.fast.scaled_dot_product_attention(queries[:, :, i : i + step], keys, values, scale=size**-0.5)
        for i in range(0, queries.shape[2], step)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
