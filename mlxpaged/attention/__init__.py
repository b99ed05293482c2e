"""Paged attention over KV pools: a step's metadata, one pool per layer, and the cache object that a model sees."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.attention.backends import BACKENDS
    from mlxpaged.attention.kv_cache import LayerKVCache, resolve_backend
    from mlxpaged.attention.latent import LatentLayer
    from mlxpaged.attention.layer import (
        PagedAttentionError,
        PagedLayer,
        StepContext,
        WindowMismatchError,
        route_attention,
    )
    from mlxpaged.attention.layout import KV_DTYPES, AttentionShape, KVLayout
    from mlxpaged.attention.metadata import AttentionMetadata, TableView
    from mlxpaged.attention.self_check import BackendChoice, ReportAmount, choose_backend
    from mlxpaged.attention.tuner import Limits, choose_tunings
    from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning, parse_tuning
else:
    __getattr__ = lazy_names(__name__, __file__)
