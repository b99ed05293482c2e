"""The KV cache of one layer. It checks arguments, then calls the pool of its backend."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.backends import BACKENDS
from mlxpaged.attention.gather import GatherPool
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, Planner
from mlxpaged.attention.metal import MetalPool
from mlxpaged.attention.pool import KVPool, Locality, Memory, Options
from mlxpaged.attention.qkv import Qkv, row_size
from mlxpaged.attention.quantization import Quantization
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning
from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE

POOLS: dict[str, Callable[[KVLayout, Memory], KVPool]] = {"gather": GatherPool}
"""Pools without a tuning, by backend. mlxpaged/cpu adds its own when a model's loader imports it."""


def resolve_backend(backend: str) -> str:
    """The backend that `backend` stands for: "auto" is "cpu" if MLX's default device is the CPU, else "gather".

    For "auto", the engine first checks the Metal kernels (self_check.py). Raises ValueError if a backend does not exist
    or cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    on_cpu = mx.default_device() == mx.Device(mx.cpu) and "cpu" in POOLS
    if backend == "metal" and not kernels.can_run():
        raise ValueError(
            "attention backend 'metal' is not available: it needs a Mac with a Metal device; use 'auto' or 'gather'"
        )
    if backend == "cpu" and not on_cpu:
        raise ValueError("attention backend 'cpu' is not available: MLX runs on a GPU here; use 'auto' or 'gather'")
    if backend == "auto":
        return "cpu" if on_cpu else "gather"
    return backend


class LayerKVCache:
    """Keys and values of one layer: `num_blocks` blocks, addressed through block tables.

    head_dim: size of a key, and of a value if value_size is None. latent, quantization: as in KVLayout. tuning: how the
    Metal backend attends; the others ignore it. Raises ValueError if an argument is out of range, or if the backend
    does not support a type or size.

    fuses: whether `write_rows` is one kernel on the Metal backend.
    """

    fuses = True

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: str = "auto",
        tuning: Tuning = DEFAULT_TUNING,
        value_size: int | None = None,
        latent: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        if head_dim < 1:
            raise ValueError(f"head_dim must be positive, got {head_dim}")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        sizes = num_kv_heads, head_dim, value_size or head_dim
        self.layout = KVLayout(*sizes, dtype, block_size, latent, quantization)
        self.backend = resolve_backend(backend)
        self.tuning = tuning
        self._blocks_per_block = 1  # blocks of this layout in a block of the memory
        self._memory = Memory.zeros(num_blocks, self.layout, in_place=self.backend == "metal")
        self._pool = self._make_pool()

    @classmethod
    def from_layout(
        cls, num_blocks: int, layout: KVLayout, backend: str = "auto", tuning: Tuning = DEFAULT_TUNING
    ) -> LayerKVCache:
        sizes = (layout.num_kv_heads, layout.key_size, layout.dtype, layout.block_size)
        return cls(num_blocks, *sizes, backend, tuning, layout.value_size, layout.latent, layout.quantization)

    def view(self, layout: KVLayout, tuning: Tuning = DEFAULT_TUNING, fuses: bool = True) -> LayerKVCache:
        """A cache of another layer in the same memory. It may have smaller blocks: n of them, from block n * b on, have
        the place of block b. Raises ValueError if a block of this cache does not consist of blocks of that layout."""
        ratio = self.layout.blocks_of(layout)
        if not ratio:
            raise ValueError(f"a block of {self.layout} does not consist of blocks of {layout}")
        other = copy.copy(self)
        other.layout, other.tuning, other.fuses = layout, tuning, fuses
        other._blocks_per_block = self._blocks_per_block * ratio
        other._pool = other._make_pool()
        return other

    def _make_pool(self) -> KVPool:
        if self.backend == "metal":
            return MetalPool(self.layout, self._memory, self.tuning)
        if self.layout.quantization is not None:
            return GatherPool(self.layout, self._memory)  # the "cpu" backend multiplies with blocks in place
        return POOLS[self.backend](self.layout, self._memory)

    @property
    def num_blocks(self) -> int:
        return self._memory.num_blocks * self._blocks_per_block

    def clear(self) -> None:
        """Make every block zero, in new memory, for all views too. Call it on the cache that made the memory."""
        self._memory.replace(Memory.zeros(self.num_blocks, self.layout, in_place=self.backend == "metal"))

    def resize(self, num_blocks: int) -> None:
        """Copy the blocks that remain into new memory of `num_blocks` blocks, for all views too, and free the old one.

        Call it between two steps, on the cache that made the memory. Needs memory for the old and the new blocks. If
        it raises MLX's error because there is too little, nothing has changed.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self._memory.resize(num_blocks)

    @property
    def memory(self) -> Memory:
        """What it shares with its views."""
        return self._memory

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Evaluated at the end of a step, so that its reads and writes are done."""
        return self._memory.arrays

    @property
    def nbytes(self) -> int:
        return sum(int(plane.nbytes) for plane in self._memory.planes)

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        """Store the keys and values [T, num_kv_heads, size] of the step's query tokens in their slots.

        A latent layout takes the latents for keys, and for values the rotary part of the keys, k_pe.
        """
        self._check_meta(meta)
        layout = self.layout
        names = ("latents", "k_pe") if layout.latent else ("keys", "values")
        for name, array, size in zip(names, (keys, values), layout.input_sizes, strict=True):
            expected = (meta.num_tokens, layout.num_kv_heads, size)
            if array.shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
            if array.dtype != layout.dtype:
                raise ValueError(f"{name} must be {layout.dtype}, the type of the pool, got {array.dtype}")
        self._pool.write(keys, values, meta)

    def write_rows(self, rows: mx.array, qkv: Qkv, meta: AttentionMetadata) -> mx.array:
        """Make queries, keys and values of the rows [T, row] of the step's query tokens. Store the keys and values in
        their slots, and return the queries [T, Hq, key_size]."""
        self._check_meta(meta)
        expected = meta.num_tokens, row_size(self.layout, qkv.num_query_heads, qkv.gated)
        if rows.shape != expected or rows.dtype != self.layout.dtype:
            raise ValueError(f"rows must be {self.layout.dtype} {expected}, got {rows.dtype} {rows.shape}")
        if self.fuses and isinstance(self._pool, MetalPool):
            return self._pool.write_rows(rows, qkv, meta)
        queries, keys, values = (x.squeeze(2) for x in qkv.split(rows, self.layout, meta.positions))
        self.write(keys, values, meta)
        return queries

    def attend(
        self,
        queries: mx.array,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chunk: int | None = None,
        mutual: bool = False,
        q_pe: mx.array | None = None,
    ) -> mx.array:
        """Causal attention of the query tokens over their contexts, [T, Hq, key_size] -> [T, Hq, value_size].

        A latent layout takes the queries' latents [T, Hq, value_size], and their rotary part times `scale` as q_pe.

        window: a query sees only the last `window` keys, its own included. chunk: a query at position p sees only keys
        from position `p // chunk * chunk` on (Llama 4). softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks[Hq]: one logit per head that is added to the softmax's denominator. mutual: a query of an image in the
        step's spans also sees the keys after it up to the image's end (Gemma 3).

        All keys of the contexts must have been written by `write` or `write_blocks` of the same backend, which may rely
        on how it left the unused slots of a block.
        """
        self._check_meta(meta)
        layout = self.layout
        columns, pe_size = layout.input_sizes
        if queries.ndim != 3 or queries.shape[0] != meta.num_tokens or queries.shape[2] != columns:
            raise ValueError(f"queries must have shape ({meta.num_tokens}, heads, {columns}), got {queries.shape}")
        num_heads = queries.shape[1]
        if num_heads == 0 or num_heads % layout.num_kv_heads:
            raise ValueError(f"{num_heads} query heads are not a multiple of the {layout.num_kv_heads} KV heads")
        if queries.dtype != layout.dtype:
            raise ValueError(f"queries must be {layout.dtype}, the type of the pool, got {queries.dtype}")
        for name, size in (("window", window), ("chunk", chunk)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise ValueError(f"{name} must be a positive integer, got {size}")
        if window is not None and chunk is not None:
            raise ValueError(f"window and chunk exclude each other, got {window} and {chunk}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap must be positive, got {softcap}")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks must have shape ({num_heads},), got {sinks.shape}")
        if sinks is not None and not mx.issubdtype(sinks.dtype, mx.floating):
            raise ValueError(f"sinks must be of a float type, got {sinks.dtype}")
        needed = ((*queries.shape[:2], pe_size), queries.dtype) if layout.latent else None
        if needed != (given := None if q_pe is None else (q_pe.shape, q_pe.dtype)):
            raise ValueError(f"q_pe must be {needed}, got {given}: queries of latents have it, others have none")
        options = Options(scale, Locality(window, chunk, mutual), softcap, sinks, q_pe)
        return self._pool.attend(queries, meta, options)

    def planner(
        self, num_query_heads: int, window: int | None, chunk: int | None, mutual: bool = False
    ) -> Planner | None:
        """What plans the attention with these arguments. None if the backend's plan is no part of a step's upload."""
        if not isinstance(self._pool, MetalPool):
            return None
        return self._pool.planner(num_query_heads, Locality(window, chunk, mutual))

    def end_step(self) -> None:
        """Forget what was read in a step: all of it is evaluated before the next step writes."""
        self._memory.end_step()

    def read_context(self, meta: AttentionMetadata) -> mx.array:
        """The keys of the context of a step's only sequence, [num_kv_heads, context_len, key_size], in order."""
        self._check_meta(meta)
        if len(meta.step.context_lens) != 1:
            raise ValueError(f"metadata of one sequence is needed, not of {len(meta.step.context_lens)}")
        return self._pool.read_context(meta)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` for every (src, dst): all reads see the pool as it was before the call."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        self._check_blocks(sources)
        self._check_targets(targets)
        self._memory.move(self._blocks_per_block, sources, targets)

    def read_blocks(self, ids: Sequence[int]) -> list[mx.array]:
        """The planes of whole blocks, [n, *plane.shape] each, as they are now."""
        self._check_blocks(ids)
        planes = self.layout.planes
        if not ids:
            return [mx.zeros((0, *plane.shape), plane.dtype) for plane in planes]
        copies = self._memory.move(self._blocks_per_block, ids, None)
        return [copy.reshape(-1, *plane.shape) for copy, plane in zip(copies, planes, strict=True)]

    def write_blocks(self, ids: Sequence[int], *planes: mx.array) -> None:
        """Overwrite whole blocks with what `read_blocks` of a cache of the same layout and backend returned."""
        self._check_targets(ids)
        needed = {plane.name: ((len(ids), *plane.shape), plane.dtype) for plane in self.layout.planes}
        if (given := [(plane.shape, plane.dtype) for plane in planes]) != [*needed.values()]:
            raise ValueError(f"blocks of this layout have {needed}, got {given}")
        if ids:
            self._memory.move(self._blocks_per_block, None, ids, planes)

    def _check_meta(self, meta: AttentionMetadata) -> None:
        block_size = self.layout.block_size
        if meta.block_size != block_size:
            raise ValueError(f"metadata for blocks of {meta.block_size} tokens, but the pool's have {block_size}")
        self.check_block(meta.max_block)

    def check_block(self, block: int) -> None:
        """Raises ValueError if the pool has no block of that number, or none that large."""
        if block >= self.num_blocks:
            raise ValueError(f"block id {block} is out of range: the pool has {self.num_blocks} blocks")

    def _check_targets(self, ids: Sequence[int]) -> None:
        self._check_blocks(ids)
        if len(set(ids)) != len(ids):
            raise ValueError(f"a block is written twice: {list(ids)}")

    def _check_blocks(self, ids: Sequence[int]) -> None:
        for block in ids:
            if not isinstance(block, int) or not 0 <= block < self.num_blocks:
                raise ValueError(f"block id {block} is out of range: the pool has {self.num_blocks} blocks")
