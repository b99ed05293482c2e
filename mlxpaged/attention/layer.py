"""What an unmodified mlx-lm model sees: one KV cache per layer, and attention that reads that layer's pool.

The model gets the batch flattened to [T, 1] tokens. Every token is a row of length one with its own position, so linear
layers, norms, experts and rope need no change. Only attention combines rows of a sequence. Models call a module-level
`scaled_dot_product_attention`. `route_attention` replaces it with a function that recognises keys which a PagedLayer of
the running step has returned, and calls the original for all others, so other models of the same module are not
affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import Qkv
from mlxpaged.attention.token_groups import make_groups
from mlxpaged.core.step import Row

ATTENTION_FUNCTION = "scaled_dot_product_attention"


class PagedAttentionError(RuntimeError):
    """The model asked its cache for something that paged attention does not do."""


class WindowMismatchError(PagedAttentionError):
    """The model masks another window than its cache keeps. Its results then depend on how a prompt is cut in chunks."""


class StepContext:
    """The running step, shared by the layers of one model: its metadata, and how it is cut into calls.

    num_tokens: T of the step. groups: calls of modules with recurrent states. batches: the sequences of the first of
    these, which decode. alone: calls of modules that take one sequence at a time.
    """

    def __init__(self) -> None:
        self.attention_calls = 0
        self.cut(())
        self._metas: Sequence[AttentionMetadata] = ()
        self._written: dict[int, tuple[mx.array, mx.array, PagedLayer]] = {}  # by the identity of the keys, held here

    def cut(self, rows: Sequence[Row]) -> None:
        """Cut the rows of a step into calls, for modules that do not take all rows at once."""
        self.groups, self.alone = make_groups(rows), make_groups(rows, stack=False)
        self.batches = [group.sequence_ids for group in self.groups if group.is_rows]
        self.num_tokens = self.groups[-1].last if self.groups else 0

    def count(self, calls: int) -> None:
        """So many calls of the attention, of one layer each, were made."""
        self.attention_calls += calls

    @property
    def decodes(self) -> bool:
        """Whether each sequence decodes, from the state that it has: such a step can be replayed."""
        return bool(self.groups) and self.groups[-1].is_rows  # rows that decode are the first

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The sequences of each group of rows, and the tokens of each."""
        return tuple([(len(group.sequence_ids), group.length) for group in self.groups])

    def begin(self, metas: Sequence[AttentionMetadata]) -> None:
        """metas: for each view of the block tables."""
        global running_step
        self._metas = metas
        running_step = self

    def end(self) -> None:
        global running_step
        self._metas = ()
        self._written = {}
        running_step = None

    def meta(self, view: int) -> AttentionMetadata:
        if not self._metas:
            raise PagedAttentionError("the model was called outside a step")
        return self._metas[view]

    def wrote(self, keys: mx.array, values: mx.array, layer: PagedLayer) -> None:
        self._written[id(keys)] = (keys, values, layer)

    def layer_of(self, keys: mx.array) -> PagedLayer | None:
        """The layer whose pool has these keys: a model may attend with the keys of another layer."""
        found = self._written.get(id(keys))
        return None if found is None else found[2]

    def written_by(self, layer: PagedLayer) -> tuple[mx.array, mx.array]:
        """The keys and values that a layer has written in this step."""
        for keys, values, writer in self._written.values():
            if writer is layer:
                return keys, values
        raise PagedAttentionError("the model reads keys of a layer before it has written any")


running_step: StepContext | None = None
"""All steps run on one thread."""

attention_calls = 0
"""Calls of the routed functions. The probe counts those of mlx-lm's own forward pass."""


class PagedLayer:
    """Replaces mlx-lm's KVCache of one layer. view: index of its metadata among those of a step. window, chunk, mutual:
    as in `LayerKVCache.attend`."""

    mutual = False

    def __init__(
        self, kv: LayerKVCache, step: StepContext, window: int | None = None, chunk: int | None = None, view: int = 0
    ) -> None:
        self.kv = kv
        self.window = window
        self.chunk = chunk
        self._step = step
        self.view = view

    @property
    def _meta(self) -> AttentionMetadata:
        return self._step.meta(self.view)

    @property
    def offset(self) -> mx.array:
        """Positions [T] of the tokens: rope takes one offset per row."""
        return self._meta.positions

    def make_mask(self, *_args: Any, window_size: int | None = None, **_kwargs: Any) -> None:
        """Returns None: the metadata and the layer's window replace the mask.

        Raises WindowMismatchError if the model asks for another window than the layer's.
        """
        if window_size is not None and window_size != self.window:
            raise WindowMismatchError(
                f"the model masks a window of {window_size} keys, and its cache keeps {self.window or 'all of them'}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [T, Hkv, 1, D] to the pool. The model passes the returned arrays on, but `attend` reads the pool."""
        self.kv.write(keys.squeeze(2), values.squeeze(2), self._meta)
        self._step.wrote(keys, values, self)
        return keys, values

    def write_rows(self, rows: mx.array, qkv: Qkv) -> mx.array:
        """Make queries, keys and values of rows [T, row], and write keys and values to the pool. Returns the queries
        [T, Hq, 1, D]."""
        return self.kv.write_rows(rows, qkv, self._meta)[:, :, None]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` has returned: a layer without keys of its own attends with them (Gemma 3n)."""
        return self._step.written_by(self)

    def earlier(self) -> tuple[mx.array, mx.array]:
        """Stands for what earlier steps have written, for a layer of another model that attends with it."""
        keys, values = mx.zeros(0), mx.zeros(0)
        self._step.wrote(keys, values, self)
        return keys, values

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, softcap: float | None = None
    ) -> mx.array:
        """[T, Hq, 1, D] -> [T, Hq, 1, Dv]"""
        if mask is not None:
            raise PagedAttentionError("the model passes an attention mask of its own")
        return self._attend(queries, scale, sinks, softcap)

    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        q_pe: mx.array | None = None,
    ) -> mx.array:
        self._step.count(1)
        options: dict[str, Any] = {
            "window": self.window,
            "chunk": self.chunk,
            "mutual": self.mutual,
            "sinks": sinks,
            "softcap": softcap,
            "q_pe": q_pe,
        }
        # Phi and StableLM attend in float32 with queries of the keys' type. The pools compute in float32 anyway.
        rows = queries.squeeze(2).astype(self.kv.layout.dtype)
        return self.kv.attend(rows, self._meta, scale=scale, **options)[:, :, None].astype(queries.dtype)


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
        global attention_calls
        attention_calls += 1
        layer = running_step.layer_of(keys) if running_step is not None else None
        if layer is None and isinstance(cache, PagedLayer):
            layer = cache  # the keys were converted to another type (StableLM)
        if layer is not None:
            return layer.attend(queries, scale, mask, sinks)
        # Most modules' own function takes no sinks, so they are passed only if the model passed them.
        extra = {} if sinks is None else {"sinks": sinks}
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **extra)

    scaled_dot_product_attention.routes_paged_layers = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention
