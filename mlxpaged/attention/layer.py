"""What an unmodified mlx-lm model sees: a KV cache per layer, and attention that reads the pool behind it.

The batch reaches the model flattened to [T, 1] tokens: every token is a row of length one with its own position, so
linear layers, norms, experts and rope need no change. Attention is the one place where rows of a sequence meet. Models
call a module-level `scaled_dot_product_attention`; `route_attention` puts a function there that recognises our cache
object and calls the original for every other cache, so other models of the same module are untouched.
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
    """Stands where a model expects mlx-lm's KVCache of one layer."""

    def __init__(self, kv: LayerKVCache, step: StepContext, window: int | None = None) -> None:
        self.kv = kv
        self.window = window
        self._step = step

    @property
    def offset(self) -> mx.array:
        """Position of each token, [T]: rope takes one offset per row."""
        return self._step.meta.positions

    def make_mask(self, *_args: Any, window_size: int | None = None, **_kwargs: Any) -> None:
        """Causality and window are known from the metadata; the model gets no mask.

        Raises PagedAttentionError where the model wants another window than the one its cache is made for.
        """
        if window_size is not None and window_size != self.window:
            raise PagedAttentionError(
                f"the model masks a window of {window_size} keys, and its cache keeps {self.window or 'all of them'}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [T, Hkv, 1, D] to the pool. What is returned only satisfies the protocol: `attend` reads the pool."""
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
    """Let every module that defines a layer of `model` use paged attention for our caches. Returns how many do."""
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
        # Most modules' own function knows no sinks; pass them only where the model did.
        extra = {} if sinks is None else {"sinks": sinks}
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)

    scaled_dot_product_attention.routes_paged_layers = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention
