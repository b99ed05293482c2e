"""What an unmodified mlx-lm model sees: one KV cache per layer, and attention that reads that layer's pool.

The model gets the batch flattened to [T, 1] tokens. Every token is a row of length one with its own position, so linear
layers, norms, experts and rope need no change. Only attention combines rows of a sequence. Models call a module-level
`scaled_dot_product_attention`. `route_attention` replaces it with a function that recognises PagedLayer and calls the
original for every other cache, so other models of the same module are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.metadata import AttentionMetadata

ATTENTION_FUNCTION = "scaled_dot_product_attention"


class PagedAttentionError(RuntimeError):
    """The model asked its cache for something that paged attention does not do."""


class StepContext:
    """The metadata of the running step, shared by the layers of one model."""

    def __init__(self) -> None:
        self.attention_calls = 0
        self._meta: AttentionMetadata | None = None

    def begin(self, meta: AttentionMetadata) -> None:
        self._meta = meta

    def end(self) -> None:
        self._meta = None

    @property
    def meta(self) -> AttentionMetadata:
        if self._meta is None:
            raise PagedAttentionError("the model was called outside a step")
        return self._meta


class PagedLayer:
    """Replaces mlx-lm's KVCache of one layer."""

    def __init__(self, kv: LayerKVCache, step: StepContext, window: int | None = None) -> None:
        self.kv = kv
        self.window = window
        self._step = step

    @property
    def offset(self) -> mx.array:
        """Positions [T] of the tokens: rope takes one offset per row."""
        return self._step.meta.positions

    def make_mask(self, *_args: Any, window_size: int | None = None, **_kwargs: Any) -> None:
        """Returns None: the metadata and the layer's window replace the mask.

        Raises PagedAttentionError if the model asks for another window than the layer's.
        """
        if window_size is not None and window_size != self.window:
            raise PagedAttentionError(
                f"the model masks a window of {window_size} keys, but its cache keeps {self.window or 'all of them'}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [T, Hkv, 1, D] to the pool. The model passes the returned arrays on, but `attend` reads the pool."""
        self.kv.write(keys.squeeze(2), values.squeeze(2), self._step.meta)
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """[T, Hq, 1, D] -> [T, Hq, 1, D]"""
        if mask is not None:
            raise PagedAttentionError("the model passes an attention mask of its own")
        self._step.attention_calls += 1
        out = self.kv.attend(queries.squeeze(2), self._step.meta, scale=scale, window=self.window, sinks=sinks)
        return out[:, :, None]


def route_attention(model: Module) -> int:
    """Make each module that defines a layer of `model` use paged attention for PagedLayer. Returns their number."""
    names = {type(module).__module__ for _, module in model.named_modules()}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], ATTENTION_FUNCTION)]
    for module in modules:
        original = getattr(module, ATTENTION_FUNCTION)
        if not getattr(original, "routes_paged_layers", False):
            setattr(module, ATTENTION_FUNCTION, _routing(original))
    return len(modules)


def _routing(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, PagedLayer):
            return cache.attend(queries, scale, mask, sinks)
        # Most modules' own function takes no sinks, so they are passed only if the model passed them.
        extra = {} if sinks is None else {"sinks": sinks}
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)

    scaled_dot_product_attention.routes_paged_layers = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention
