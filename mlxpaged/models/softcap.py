"""Paged attention for modules that compute softcapped attention themselves (Gemma 2).

They call no attention function that could be routed to a pool. So the module's own projections and rotary embedding are
used, and its scores are left to the pool. The probe compares the result with mlx-lm's.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.attention.layer import PagedLayer

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "rope", "scale", "n_heads", "n_kv_heads", "attn_logit_softcapping")


def attend_with_softcap(module: Module) -> None:
    """Make a module with PARTS attend to the pool of a PagedLayer; other modules and other caches are not affected."""
    base = type(module)
    if not all(hasattr(module, name) for name in PARTS) or getattr(base, "attends_with_softcap", False):
        return

    def run(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayer):
            result: mx.array = base.__call__(self, x, mask, cache)
            return result
        queries, keys, values = (
            projection(x).reshape(x.shape[0], 1, heads, -1).swapaxes(1, 2)
            for projection, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        offset = cache.offset
        cache.update_and_fetch(self.rope(keys, offset=offset), values)
        queries = self.rope(queries, offset=offset)
        out = cache.attend(queries, self.scale, mask, None, self.attn_logit_softcapping)
        projected: mx.array = self.o_proj(out.swapaxes(1, 2).flatten(2))
        return projected

    module.__class__ = type(base.__name__, (base,), {"__call__": run, "attends_with_softcap": True})
