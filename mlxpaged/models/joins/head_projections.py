"""Projections with a matrix for each head, of latent attention.

mlx-lm computes [n, heads, length, size] @ [heads, size, other size]. A step has its tokens in the first axis, with a
length of 1. MLX then reads all matrices once for each token. With the tokens in the axis of the length, it reads them
once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear


def project_rows_together(module: Module) -> None:
    """Makes a module of this kind move the rows of a step into one product; other modules are not affected."""
    base = type(module)
    if not isinstance(module, (MultiLinear, QuantizedMultiLinear)) or hasattr(base, "projects_rows_together"):
        return

    def project(self: Any, x: mx.array, transpose: bool = True) -> mx.array:
        are_rows = x.ndim == 4 and x.shape[0] > 1 and x.shape[2] == 1
        projected: mx.array = base.__call__(self, x.swapaxes(0, 2) if are_rows else x, transpose)
        return projected.swapaxes(0, 2) if are_rows else projected

    module.__class__ = type(base.__name__, (base,), {"__call__": project, "projects_rows_together": True})
