"""Times one layer's calls beside MLX's own attention, for the shapes of a model's layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlxpaged.attention.gather import contiguous_attention
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Locality, Options
from mlxpaged.attention.tuner import Tuner, of_size
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning
from mlxpaged.cli.doctor.sizes import Sizes

Figures = dict[str, Any]


def attention_times(
    shapes: Sequence[AttentionShape],
    backend: str,
    tunings: Mapping[AttentionShape, Tuning],
    context: int,
    sizes: Sizes,
) -> list[Figures]:
    """Microseconds per call, the host's work included: `us` of the backend, `mlx_us` of MLX's attention over the same
    keys, if they were contiguous. context: the longest of the model, in tokens."""
    contexts = list(dict.fromkeys(min(keys, context) for keys in sizes.keys))
    found: list[Figures] = []
    for shape in dict.fromkeys(shapes):
        layer = TimedLayer(shape, backend, tunings.get(shape, DEFAULT_TUNING), max(contexts))
        found.append({"layers": str(shape), "call": "write", "queries": 1, "us": layer.time_write()})
        for queries in sizes.queries:
            for keys in contexts:
                call = {"layers": str(shape), "call": "attend", "queries": min(queries, keys), "keys": keys}
                found.append(call | layer.time_attention(min(queries, keys), keys))
    return found


class TimedLayer:
    """A layer with a pool of zeros: the time does not depend on the contents of a key. Its blocks are in random
    order."""

    def __init__(self, shape: AttentionShape, backend: str, tuning: Tuning, longest: int) -> None:
        layout = shape.layout
        self._shape = shape
        self._table = list(range(-(-longest // layout.block_size)))
        random.Random(0).shuffle(self._table)
        self._kv = LayerKVCache.from_layout(len(self._table), layout, backend, tuning)
        sinks = mx.zeros((shape.num_query_heads,), layout.dtype) if shape.sinks else None
        locality = Locality(shape.window, shape.chunk)
        self._options = Options(layout.key_size**-0.5, locality, 1.0 if shape.softcap else None, sinks)

    def time_write(self) -> float:
        """Seconds to write one token's keys and values."""
        layout, meta = self._shape.layout, self._meta(1, 1)
        keys, values = (mx.zeros((1, layout.num_kv_heads, size), layout.dtype) for size in layout.input_sizes)

        def run(calls: int) -> None:
            for _ in range(calls):
                self._kv.write(keys, values, meta)
            mx.eval(self._kv.arrays)

        return 1e6 * Tuner().time(run)

    def time_attention(self, queries: int, keys: int) -> Figures:
        shape, layout, options = self._shape, self._shape.layout, self._options
        meta, locality = self._meta(queries, keys), options.locality
        rows, q_pe, whole = (
            mx.zeros((queries, shape.num_query_heads, size), layout.dtype)
            for size in (*layout.input_sizes, layout.key_size)
        )
        named: dict[str, Any] = {
            "window": shape.window,
            "chunk": shape.chunk,
            "softcap": options.softcap,
            "sinks": options.sinks,
            "q_pe": q_pe if layout.latent else None,
        }
        position = np.arange(keys)
        first_keys = locality.first_key(position[keys - queries :])
        seen = position[first_keys[0] :]  # by any of the queries
        shown = (seen <= position[keys - queries :, None]) & (seen >= first_keys[:, None])
        of_keys, of_values = (
            mx.zeros((1, layout.num_kv_heads, len(seen), size), layout.dtype)
            for size in (layout.key_size, layout.value_size)
        )
        mask: mx.array | Literal["causal"] = "causal" if first_keys[-1] == first_keys[0] else mx.array(shown)
        mx.eval(of_keys, of_values, mask if isinstance(mask, mx.array) else ())

        def paged(rows: mx.array) -> mx.array:
            return self._kv.attend(rows, meta, scale=options.scale, **named)

        def contiguous(rows: mx.array) -> mx.array:
            out = contiguous_attention(rows[None].swapaxes(1, 2), of_keys, of_values, mask, options)
            return out.squeeze(0).swapaxes(0, 1)

        return {"us": self._time(paged, rows), "mlx_us": self._time(contiguous, whole)}

    def _time(self, attend: Callable[[mx.array], mx.array], rows: mx.array) -> float:
        """Each call takes the output of the one before, as layers do."""

        def run(calls: int) -> None:
            out = rows
            for _ in range(calls):
                out = attend(of_size(out, rows.shape[-1]))
            mx.eval(out)

        return 1e6 * Tuner().time(run)

    def _meta(self, queries: int, keys: int) -> AttentionMetadata:
        size = self._shape.layout.block_size
        return AttentionMetadata.build([queries], [keys], [self._table[: -(-keys // size)]], size)
