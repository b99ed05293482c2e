"""Paged attention over the KV pools: metadata of a step, one pool per layer, and what a model sees as its cache."""

from mlxpaged.attention.kv_cache import BACKENDS, LayerKVCache, resolve_backend
from mlxpaged.attention.layer import PagedAttentionError, PagedLayer, StepContext, route_attention
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.self_check import AttentionShape, choose_backend

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "AttentionShape",
    "LayerKVCache",
    "PagedAttentionError",
    "PagedLayer",
    "StepContext",
    "choose_backend",
    "resolve_backend",
    "route_attention",
]
