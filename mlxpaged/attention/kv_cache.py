"""The KV pool of one layer, and the attention over it: checks its arguments, then hands them to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.gather import GatherPool
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.metal import MetalPool
from mlxpaged.attention.pool import KVPool, Options
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning

Backend = Literal["auto", "metal", "gather"]
BACKENDS: tuple[str, ...] = get_args(Backend)
KV_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def resolve_backend(backend: str) -> str:
    """The backend of a pool that is made with `backend`; "auto" is gather, which runs anywhere.

    The engine does not leave it at that: it resolves "auto" with a self-check first (self_check.py). Raises ValueError
    for a backend that does not exist or cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "metal" and not kernels.can_run():
        raise ValueError(
            "attention backend 'metal' is not available: it needs a Mac with a Metal device; use 'auto' or 'gather'"
        )
    return "metal" if backend == "metal" else "gather"


class LayerKVCache:
    """Keys and values of one layer, `num_blocks` blocks of `block_size` tokens, addressed through block tables.

    tuning: how the Metal backend attends; the gather backend has one way. Raises ValueError for arguments out of range,
    and for a type or size that the backend is not made for.
    """

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        block_size: int = 32,
        backend: str = "auto",
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        if dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype must be float32, float16 or bfloat16, got {dtype}")
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.block_size = block_size
        self.backend = resolve_backend(backend)
        self.tuning = tuning
        self.clear()

    def clear(self) -> None:
        """Make every block zero, in new memory."""
        layout = (self.num_blocks, self.num_kv_heads, self.head_dim, self.dtype, self.block_size)
        self._pool: KVPool = MetalPool(*layout, self.tuning) if self.backend == "metal" else GatherPool(*layout)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """To be evaluated at the end of a step, so that its writes are done."""
        return self._pool.arrays

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * int(self.dtype.size)

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        """Store the keys and values [T, num_kv_heads, head_dim] of the step's query tokens in their slots."""
        self._check_meta(meta)
        expected = (meta.num_tokens, self.num_kv_heads, self.head_dim)
        for name, array in (("keys", keys), ("values", values)):
            if array.shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
            if array.dtype != self.dtype:
                raise ValueError(f"{name} must be {self.dtype}, the type of the pool, got {array.dtype}")
        self._pool.write(keys, values, meta)

    def attend(
        self,
        queries: mx.array,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Causal attention of the query tokens over their sequences' contexts, [T, num_q_heads, head_dim] in and out.

        window: a query sees only the last `window` keys, its own included. softcap: scores become
        `softcap * tanh(scores / softcap)`. sinks[num_q_heads]: a logit per head that takes part in the softmax and
        carries no value. The step's keys must have been written, and those before them, by `write` of the same
        backend: it leaves the rest of a block as its `attend` wants it.
        """
        self._check_meta(meta)
        if queries.ndim != 3 or queries.shape[0] != meta.num_tokens or queries.shape[2] != self.head_dim:
            raise ValueError(
                f"queries must have shape ({meta.num_tokens}, heads, {self.head_dim}), got {queries.shape}"
            )
        num_heads = queries.shape[1]
        if num_heads == 0 or num_heads % self.num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if queries.dtype != self.dtype:
            raise ValueError(f"queries must be {self.dtype}, the type of the pool, got {queries.dtype}")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window must be positive, a whole number, got {window}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap must be positive, got {softcap}")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks must have shape ({num_heads},), got {sinks.shape}")
        if sinks is not None and not mx.issubdtype(sinks.dtype, mx.floating):
            raise ValueError(f"sinks must be of a float type, got {sinks.dtype}")
        return self._pool.attend(queries, meta, Options(scale, window, softcap, sinks))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` for every (src, dst): all reads see the pool as it was before the call."""
        if not pairs:
            return
        sources, targets = [list(ids) for ids in zip(*pairs, strict=True)]
        self._check_blocks(sources)
        self._check_targets(targets)
        self._pool.copy_blocks(sources, targets)

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values of whole blocks, [n, num_kv_heads, block_size, head_dim] each, as they are now."""
        self._check_blocks(ids)
        return self._pool.read_blocks(ids)

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Overwrite whole blocks with what `read_blocks` returned, here or from a cache of the same layout and
        backend."""
        self._check_targets(ids)
        expected = (len(ids), self.num_kv_heads, self.block_size, self.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"keys and values must have shape {expected}, got {keys.shape} and {values.shape}")
        if keys.dtype != self.dtype or values.dtype != self.dtype:
            raise ValueError(f"keys and values must be {self.dtype}, got {keys.dtype} and {values.dtype}")
        self._pool.write_blocks(ids, keys, values)

    def _check_meta(self, meta: AttentionMetadata) -> None:
        if meta.block_size != self.block_size:
            raise ValueError(f"metadata is for blocks of {meta.block_size} tokens, the pool has {self.block_size}")
        if meta.max_block >= self.num_blocks:
            raise ValueError(f"block id {meta.max_block} is out of range: the pool has {self.num_blocks} blocks")
        if meta.repeats and self.backend == "metal":
            raise ValueError("repeated tokens are for the gather backend: the Metal kernels write a slot once")

    def _check_targets(self, ids: Sequence[int]) -> None:
        self._check_blocks(ids)
        if len(set(ids)) != len(ids):
            raise ValueError(f"a block is written twice: {list(ids)}")

    def _check_blocks(self, ids: Sequence[int]) -> None:
        for block in ids:
            if not isinstance(block, int) or not 0 <= block < self.num_blocks:
                raise ValueError(f"block id {block} is out of range: the pool has {self.num_blocks} blocks")
