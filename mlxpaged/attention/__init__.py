"""Paged attention over the KV pools: metadata of a step, one pool per layer, and what a model sees as its cache."""

from mlxpaged.attention.kv_cache import BACKENDS, LayerKVCache, resolve_backend
from mlxpaged.attention.layer import PagedAttentionError, PagedLayer, StepContext, route_attention
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.self_check import AttentionShape, choose_backend
from mlxpaged.attention.tuner import Limits, choose_tunings
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning, parse_tuning

__all__ = [
    "BACKENDS",
    "DEFAULT_TUNING",
    "AttentionMetadata",
    "AttentionShape",
    "LayerKVCache",
    "Limits",
    "PagedAttentionError",
    "PagedLayer",
    "StepContext",
    "Tuning",
    "choose_backend",
    "choose_tunings",
    "parse_tuning",
    "resolve_backend",
    "route_attention",
]
