"""Finds the shapes of a model's attention layers, and whether a paged KV cache can replace their own caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlxpaged.attention import AttentionShape, KVLayout, route_attention
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.models.errors import UnsupportedModelError

REASONS = {
    "ArraysCache": "it has recurrent layers (state-space or linear attention), whose state does not live in KV blocks",
    "MambaCache": "it has recurrent layers (state-space or linear attention), whose state does not live in KV blocks",
    "ChunkedKVCache": "it has chunked local attention layers",
    "CacheList": "its layers keep several caches each",
}


@dataclass(frozen=True)
class LayerSpec:
    """What a layer keeps for each token, and how it attends. key_size, value_size: elements of one head.

    window: keys that a query sees, None for all. A probe finds num_query_heads and sinks.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    window: int | None = None
    num_query_heads: int = 0
    sinks: bool = False

    def kv_layout(self, block_size: int = DEFAULT_BLOCK_SIZE) -> KVLayout:
        return KVLayout(self.num_kv_heads, self.key_size, self.value_size, self.dtype, block_size)

    def attention_shape(self, block_size: int) -> AttentionShape:
        return AttentionShape(self.num_query_heads, self.kv_layout(block_size), self.window, self.sinks)


def layer_specs(model: Module) -> list[LayerSpec]:
    """One spec per layer, found by running one token through the model with mlx-lm's own caches.

    Raises UnsupportedModelError if a layer needs more than keys and values per token.
    """
    caches = make_prompt_cache(model)
    windows = [cache_window(cache) for cache in caches]
    if route_attention(model) == 0:
        raise UnsupportedModelError("it computes attention itself instead of calling scaled_dot_product_attention")
    mx.eval(model(mx.array([[0]]), cache=caches))
    specs = [layer_spec(cache, window) for cache, window in zip(caches, windows, strict=True)]
    if not specs:
        raise UnsupportedModelError("it has no attention layers")
    return specs


def cache_window(cache: Any) -> int | None:
    kind = type(cache)
    if kind is KVCache:
        return None
    if kind is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    reason = REASONS.get(kind.__name__, f"its layers keep a {kind.__name__} instead of a plain KV cache")
    raise UnsupportedModelError(reason)


def layer_spec(cache: Any, window: int | None) -> LayerSpec:
    keys, values = cache.keys, cache.values
    if keys is None or values is None:
        raise UnsupportedModelError("a layer takes its keys and values from another layer instead of its own cache")
    if keys.shape[-1] != values.shape[-1] or keys.shape[1] != values.shape[1]:
        raise UnsupportedModelError(
            f"its cache holds latent vectors (multi-head latent attention): keys of size {keys.shape[-1]} "
            f"and values of size {values.shape[-1]}"
        )
    if keys.dtype != values.dtype:
        raise UnsupportedModelError(f"its keys are {keys.dtype}, but its values {values.dtype}")
    return LayerSpec(int(keys.shape[1]), int(keys.shape[-1]), int(values.shape[-1]), keys.dtype, window)


def bytes_per_token(specs: Sequence[LayerSpec]) -> int:
    """KV bytes of one token over all layers."""
    return sum(spec.kv_layout(block_size=1).bytes_per_token for spec in specs)
