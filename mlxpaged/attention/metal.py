"""The Metal backend: a pool that kernels write in place, and attention that reads the blocks where they are.

MLX orders kernels by the arrays that pass between them, and an array that is written in place behind its back does not
show. So every kernel that touches the pools takes a token and returns one: a reader takes the one of the write before
it, a writer one that stands for everything before it. A layer's writes and reads run in the order they were asked for,
across steps too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpaged.attention import gather, kernels
from mlxpaged.attention.gather_plan import PromptChunk, prompt_chunk
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Options
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning, chunk_class, decode_class
from mlxpaged.attention.work import Work, make_work

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)

THREADS = 128
MERGE_THREADS = 256

ROWS = 32
"""Rows (query tokens x heads) of a threadgroup at most: their outputs live in its registers, 32 to 64 a thread."""

NO_WINDOW = 2**30


@dataclass(frozen=True)
class AttentionVariant:
    """One instantiation of paged_attention.metal. heads: of a KV head's `group` query heads, how many a threadgroup
    serves; queries: tokens of its tile."""

    dtype: mx.Dtype
    head_dim: int
    block_size: int
    kv_heads: int
    group: int
    heads: int
    queries: int
    partial: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def rows(self) -> int:
        return self.queries * self.heads

    @property
    def head_tiles(self) -> int:
        return -(-self.group // self.heads)

    @property
    def tile(self) -> int:
        """Keys whose scores are held at once."""
        return 128 if self.rows <= 16 else 64

    @property
    def vec(self) -> int:
        """Columns of the output per thread: 32 sums in its registers where a threadgroup has a thread per column."""
        return max(4 if self.rows <= 8 else 2 if self.rows <= 16 else 1, -(-self.head_dim // THREADS))

    @property
    def threadgroup_memory(self) -> int:
        """Bytes: the query tile, the scores or the splits' sums in their place, and three numbers a row."""
        splits = THREADS // (self.head_dim // self.vec)
        scratch = max(self.rows * self.tile, splits * self.head_dim)
        arrays = (self.rows * self.head_dim * self.dtype.size, 4 * scratch, *[4 * self.rows] * 3)
        return sum(-(-size // 16) * 16 for size in arrays)

    @functools.cached_property
    def template(self) -> kernels.Template:
        return [
            ("T", self.dtype),
            ("O", mx.float32 if self.partial else self.dtype),
            ("D", self.head_dim),
            ("BLOCK", self.block_size),
            ("KV_HEADS", self.kv_heads),
            ("GROUP", self.group),
            ("HEADS", self.heads),
            ("QUERIES", self.queries),
            ("TILE", self.tile),
            ("VEC", self.vec),
            ("THREADS", THREADS),
            ("PARTIAL", self.partial),
            ("SOFTCAP", self.softcap),
            ("SINKS", self.sinks),
        ]


@functools.cache
def choose_variant(
    dtype: mx.Dtype,
    head_dim: int,
    block_size: int,
    kv_heads: int,
    group: int,
    single_queries: bool,
    partial: bool = False,
    softcap: bool = False,
    sinks: bool = False,
) -> AttentionVariant:
    """All heads of a group in one threadgroup where its memory and registers allow, else in as few parts as do."""
    rows = ROWS
    while True:
        heads = -(-group // -(-group // rows))
        queries = 1 if single_queries else max(1, rows // heads)
        variant = AttentionVariant(
            dtype, head_dim, block_size, kv_heads, group, heads, queries, partial, softcap, sinks
        )
        if variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY:
            return variant
        rows //= 2


@dataclass(frozen=True)
class PagedPart:
    """One launch of the paged kernel. single_queries: its sequences decode, a query tile is one token."""

    work: Work
    single_queries: bool


@dataclass(frozen=True)
class Plan:
    """How a step's query tokens are attended: a launch for the decoding sequences and one for the chunks of each
    partition, or one sequence after the other where its keys become contiguous.

    order: brings the outputs of the parts back into the order of the query tokens; None where there is one part.
    """

    parts: list[PagedPart | PromptChunk]
    order: mx.array | None


class MetalPool:
    """Keys and values as rows of `head_dim` elements, [block, kv_head, slot] in order. tuning: which kernels attend.

    Raises ValueError for a type or size that the kernels are not made for.
    """

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        block_size: int,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        check_supported(dtype, head_dim, block_size)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.block_size = block_size
        self.tuning = tuning
        rows = (num_blocks + 1) * num_kv_heads * block_size
        self._keys = mx.zeros((rows, head_dim), dtype)
        self._values = mx.zeros((rows, head_dim), dtype)
        self._token = mx.zeros((1,), mx.int32)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self._keys, self._values, self._token

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        quads = self.head_dim // 4
        (self._token,) = kernels.launch(
            "kv_write",
            [keys, values, meta.slot_mapping, self._keys, self._values, self._token],
            [*self._row_template(), ("BLOCK", self.block_size)],
            grid=(quads, self.num_kv_heads, meta.num_tokens),
            threadgroup=(quads, 1, 1),
            outputs=[((1,), mx.int32)],
        )

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        group = queries.shape[1] // self.num_kv_heads
        plan = self._plan(meta, options.window, group)
        outputs, tokens = [], []
        for part in plan.parts:
            if isinstance(part, PagedPart):
                out, token = self._attend_paged(queries, meta, options, part.work, part.single_queries)
            else:
                keys, values, token = self._contiguous(part)
                by_head = queries[part.rows].swapaxes(0, 1)
                out = gather.attend_contiguous(by_head, keys, values, part, options).swapaxes(0, 1)
            outputs.append(out)
            tokens.append(token)
        self._token = functools.reduce(mx.add, tokens)  # readers need not wait for each other, a writer for all
        return outputs[0] if plan.order is None else mx.concatenate(outputs)[plan.order]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if set(sources) & set(targets):  # a thread might read a block that another one has overwritten already
            self.write_blocks(targets, *self.read_blocks(sources))
            return
        pairs = mx.array(list(zip(sources, targets, strict=True)), mx.int32)
        self._launch_blocks("block_copy", [pairs, self._keys, self._values, self._token], len(sources))

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        shape = (len(ids), self.num_kv_heads, self.block_size, self.head_dim)
        if not ids:
            return mx.zeros(shape, self.dtype), mx.zeros(shape, self.dtype)
        blocks = mx.array(list(ids), mx.int32)
        inputs = [self._keys, self._values, blocks, self._token]
        keys, values = self._launch_blocks("block_read", inputs, len(ids), (shape, self.dtype), (shape, self.dtype))
        return keys, values

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        if not ids:
            return
        blocks = mx.array(list(ids), mx.int32)
        self._launch_blocks("block_write", [keys, values, blocks, self._keys, self._values, self._token], len(ids))

    def _plan(self, meta: AttentionMetadata, window: int | None, group: int) -> Plan:
        """Made once a step for all layers with the same window and heads."""
        key = ("metal", window, group, self.tuning)
        if key not in meta.derived:
            meta.derived[key] = self._make_plan(meta, window, group)
        plan: Plan = meta.derived[key]
        return plan

    def _make_plan(self, meta: AttentionMetadata, window: int | None, group: int) -> Plan:
        """Decoding sequences share one class, and with it one way; every chunk has its own."""
        lens = np.asarray(meta.host_query_lens)
        starts = np.concatenate(([0], np.cumsum(lens)))
        keys = np.minimum(meta.host_context_lens, NO_WINDOW if window is None else window)
        decoding = np.flatnonzero(lens == 1)
        members: dict[tuple[bool, int | None], list[int]] = {}
        if decoding.size:
            choice = self.tuning.choice(decode_class(keys[decoding]))
            members[True, choice.partition] = decoding.tolist()
        for i in np.flatnonzero(lens > 1).tolist():
            choice = self.tuning.choice(chunk_class(int(lens[i]), int(keys[i])))
            members.setdefault((False, choice.partition), []).append(i)
        tile = self._variant(group, False).queries
        parts: list[PagedPart | PromptChunk] = []
        for (single, partition), sequences in members.items():
            if partition is None:
                parts += [prompt_chunk(meta, i, int(starts[i]), window, group) for i in sequences]
            else:
                work = make_work(meta, np.asarray(sequences), window, 1 if single else tile, partition)
                parts.append(PagedPart(work, single))
        if len(parts) == 1:
            return Plan(parts, None)
        rows = [np.arange(starts[i], starts[i + 1]) for i in itertools.chain(*members.values())]
        return Plan(parts, mx.array(np.argsort(np.concatenate(rows)).astype(np.int32)))

    def _variant(self, group: int, single_queries: bool, *flags: bool) -> AttentionVariant:
        return choose_variant(
            self.dtype, self.head_dim, self.block_size, self.num_kv_heads, group, single_queries, *flags
        )

    def _attend_paged(
        self, queries: mx.array, meta: AttentionMetadata, options: Options, work: Work, single_queries: bool
    ) -> tuple[mx.array, mx.array]:
        """The rows of `work`, in its order, and the token of having read the pools."""
        heads = queries.shape[1]
        partial = work.ranges is not None
        variant = self._variant(
            heads // self.num_kv_heads,
            single_queries,
            partial,
            options.softcap is not None,
            options.sinks is not None and not partial,
        )
        sinks = self._token if options.sinks is None else options.sinks.astype(mx.float32)
        width = self.head_dim + 4 if partial else self.head_dim
        window = NO_WINDOW if options.window is None else min(options.window, NO_WINDOW)
        out, token = kernels.launch(
            "paged_attention",
            [
                queries,
                self._keys,
                self._values,
                meta.block_tables,
                work.items,
                sinks,
                float(options.scale),
                window,
                float(options.softcap or 1.0),
                self._token,
            ],
            variant.template,
            grid=(THREADS, self.num_kv_heads * variant.head_tiles, work.num_items),
            threadgroup=(THREADS, 1, 1),
            outputs=[((work.num_partials, heads, width), mx.float32 if partial else self.dtype), ((1,), mx.int32)],
            threadgroup_memory=variant.threadgroup_memory,
        )
        if work.ranges is None:
            return out, token
        (merged,) = kernels.launch(
            "merge_partials",
            [out, work.ranges, sinks],
            [("T", self.dtype), ("D", self.head_dim), ("HEADS", heads), ("SINKS", options.sinks is not None)],
            grid=(MERGE_THREADS, heads, work.num_rows),
            threadgroup=(MERGE_THREADS, 1, 1),
            outputs=[((work.num_rows, heads, self.head_dim), self.dtype)],
            threadgroup_memory=MERGE_THREADS // 32 * (self.head_dim + 2) * 4,
        )
        return merged, token

    def _contiguous(self, chunk: PromptChunk) -> tuple[mx.array, mx.array, mx.array]:
        """The chunk's keys and values, [num_kv_heads, num_keys, head_dim] each, and the token of having read them."""
        quads = self.head_dim // 4
        shape = (self.num_kv_heads, chunk.num_keys, self.head_dim)
        keys, values, token = kernels.launch(
            "kv_gather",
            [self._keys, self._values, chunk.block_ids, self._token],
            [*self._row_template(), ("BLOCK", self.block_size)],
            grid=(quads, chunk.num_keys, self.num_kv_heads),
            threadgroup=(quads, min(8, chunk.num_keys), 1),
            outputs=[(shape, self.dtype), (shape, self.dtype), ((1,), mx.int32)],
        )
        return keys, values, token

    def _row_template(self) -> list[tuple[str, int | bool | mx.Dtype]]:
        return [("T", self.dtype), ("D", self.head_dim), ("KV_HEADS", self.num_kv_heads)]

    def _launch_blocks(
        self, name: str, inputs: Sequence[mx.array], count: int, *outputs: tuple[tuple[int, ...], mx.Dtype]
    ) -> list[mx.array]:
        size = self.num_kv_heads * self.block_size * self.head_dim
        *results, self._token = kernels.launch(
            name,
            inputs,
            [("T", self.dtype), ("SIZE", size)],
            grid=(size // 4, count, 1),
            threadgroup=(min(size // 4, 256), 1, 1),
            outputs=[*outputs, ((1,), mx.int32)],
        )
        return results


def check_supported(dtype: mx.Dtype, head_dim: int, block_size: int) -> None:
    """Raises ValueError naming what the kernels are not made for."""
    if dtype not in DTYPES:
        raise ValueError(f"the Metal kernels take float32, float16 and bfloat16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the Metal kernels take head sizes {', '.join(map(str, HEAD_DIMS))}, not {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"the Metal kernels take blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not {block_size}"
        )
