"""The interface of a backend's KV pool. LayerKVCache checks arguments; the pool of a backend does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.metadata import AttentionMetadata


class Locality(NamedTuple):
    """The keys before its own that a query sees: all, or as `LayerKVCache.attend` says. At most one is not None."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Position of the first key that a query at each of `positions` sees."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(positions - (self.window - 1), 0)
        if self.chunk is not None:
            first = positions // self.chunk * self.chunk
        return first


class Options(NamedTuple):
    """Keyword arguments of `LayerKVCache.attend`."""

    scale: float
    locality: Locality
    softcap: float | None
    sinks: mx.array | None


class KVPool(Protocol):
    """One layer's keys and values. `LayerKVCache` documents the methods and has checked their arguments."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Keys, values unless the layout is latent, and tokens. Evaluating them waits for all reads and writes that the
        pool has launched."""

    def write(self, keys: mx.array, values: mx.array | None, meta: AttentionMetadata) -> None: ...

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array: ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]: ...

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None: ...
