"""What a backend is to LayerKVCache: it keeps one layer's keys and values and attends over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlxpaged.attention.metadata import AttentionMetadata


class Options(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    sinks: mx.array | None


class KVPool(Protocol):
    """Arguments have been checked by LayerKVCache, whose methods of the same names say what they mean."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What must be evaluated for all that was asked of the pool to be done."""

    @property
    def nbytes(self) -> int: ...

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None: ...

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array: ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]: ...

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None: ...
