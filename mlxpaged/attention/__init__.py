"""Paged attention over KV pools: a step's metadata, one pool per layer, and the cache object that a model sees."""

from mlxpaged.attention.kv_cache import BACKENDS, LayerKVCache, resolve_backend
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
