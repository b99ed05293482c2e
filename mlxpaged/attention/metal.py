"""The Metal backend: kernels write the pool in place, and attention reads its blocks in place.

MLX orders kernels by the arrays that pass between them, and it does not see a write in place. So every kernel that
touches the pools takes a token array and returns one: a reader takes the token of the last write, a writer takes one
that depends on all reads and writes before it. The writes and reads of a layer therefore run in the order in which they
were requested, across steps too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxpaged.attention import kernels
from mlxpaged.attention.gather import contiguous_attention
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Locality, Memory, Options
from mlxpaged.attention.tile_schedule import TileSchedule, make_schedule
from mlxpaged.attention.tuning import DEFAULT_TUNING, Tuning, chunk_class, decode_class, least_range
from mlxpaged.attention.variants import (
    BLOCK_SIZES,
    MAX_KEY_FLOATS,
    MAX_KEY_SIZE,
    MAX_VALUE_SIZE,
    THREADS,
    VECTOR,
    TileVariant,
    choose_decode,
    choose_tile,
)

MERGE_THREADS = 256

NO_WINDOW = 2**30


@dataclass(frozen=True)
class PagedPart:
    """One launch of a paged kernel. single_queries: all its sequences decode."""

    schedule: TileSchedule
    single_queries: bool


@dataclass(frozen=True)
class ContiguousPart:
    """One sequence: query tokens `rows` over the first num_keys keys of its blocks from `first_block` on, which are
    copied."""

    rows: slice
    sequence: int
    first_block: int
    num_keys: int
    mask: mx.array | Literal["causal"]

    def blocks(self, meta: AttentionMetadata) -> mx.array:
        key = ("metal blocks", self.sequence, self.first_block)
        if key not in meta.derived:
            end = self.first_block - (-self.num_keys // meta.block_size)
            meta.derived[key] = mx.array(meta.host_block_tables[self.sequence, self.first_block : end])
        blocks: mx.array = meta.derived[key]
        return blocks


@dataclass(frozen=True)
class Plan:
    """How the query tokens of a step attend: one launch for the decoding sequences, one for the chunks of each
    partition, and one contiguous part for each sequence whose keys are copied.

    order: puts the parts' outputs back in the order of the query tokens; None if there is one part.
    """

    parts: list[PagedPart | ContiguousPart]
    order: mx.array | None


class MetalPool:
    """Keys and values are rows of key_size and value_size elements, in the order [block, kv_head, slot]. A latent
    layout has one array; where a kernel takes a pool of values, it gets the pool of keys. tuning: which kernels attend.

    Raises ValueError for a layout that the kernels do not support.
    """

    def __init__(self, layout: KVLayout, memory: Memory, tuning: Tuning = DEFAULT_TUNING) -> None:
        check_supported(layout)
        self.layout = layout
        self.num_kv_heads = layout.num_kv_heads
        self.tuning = tuning
        self._memory = memory
        self._tile = functools.cache(functools.partial(choose_tile, layout))
        self._decode = functools.cache(functools.partial(choose_decode, layout))
        self._least_range = functools.cache(functools.partial(least_range, layout))
        self._vectors = max(layout.key_size, layout.stored_value_size) // VECTOR
        self._row_template: kernels.Template = [
            ("T", layout.dtype),
            ("DK", layout.key_size),
            ("DV", layout.stored_value_size),
            ("KV_HEADS", layout.num_kv_heads),
            ("BLOCK", layout.block_size),
        ]

    @property
    def _arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """What kernels get for keys and values, and the token."""
        memory = self._memory
        assert memory.bound is not None
        assert memory.token is not None
        return *memory.bound, memory.token

    def write(self, keys: mx.array, values: mx.array | None, meta: AttentionMetadata) -> None:
        (self._memory.token,) = kernels.launch(
            "kv_write",
            [keys, keys if values is None else values, meta.slot_mapping, *self._arrays],
            self._row_template,
            grid=(self._vectors, self.num_kv_heads, meta.num_tokens),
            threadgroup=(self._vectors, 1, 1),
            outputs=[((1,), mx.int32)],
        )

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        group = queries.shape[1] // self.num_kv_heads
        tile, least = self._tile(group).queries, self._least_range(group)
        key = ("metal", options.locality, tile, least, id(self.tuning))  # one plan for all layers with these
        if key not in meta.shared:
            meta.shared[key] = self._make_plan(meta, options.locality, tile, least)
        plan: Plan = meta.shared[key]
        outputs, tokens = [], []
        for part in plan.parts:
            if isinstance(part, PagedPart):
                out, token = self._attend_paged(queries, meta, options, part)
            else:
                out, token = self._attend_contiguous(queries, meta, options, part)
            outputs.append(out)
            tokens.append(token)
        self._memory.token = functools.reduce(mx.add, tokens)  # the next writer waits for all readers
        return outputs[0] if plan.order is None else mx.concatenate(outputs)[plan.order]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if set(sources) & set(targets):  # a thread might read a block that another one has already overwritten
            self.write_blocks(targets, *self.read_blocks(sources))
            return
        pairs = mx.array(list(zip(sources, targets, strict=True)), mx.int32)
        self._launch_blocks("block_copy", [pairs, *self._arrays], len(sources))

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        layout = self.layout
        shape = (len(ids), layout.num_kv_heads, layout.block_size)
        of_keys, of_values = (*shape, layout.key_size), (*shape, layout.stored_value_size)
        if not ids:
            return mx.zeros(of_keys, layout.dtype), mx.zeros(of_values, layout.dtype)
        blocks = mx.array(list(ids), mx.int32)
        pool_keys, pool_values, token = self._arrays
        inputs = [pool_keys, pool_values, blocks, token]
        outputs = [(shape, layout.dtype) for shape in (of_keys, (1,) if layout.latent else of_values)]
        keys, values = self._launch_blocks("block_read", inputs, len(ids), *outputs)
        return keys, mx.zeros(of_values, layout.dtype) if layout.latent else values

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        if not ids:
            return
        blocks = mx.array(list(ids), mx.int32)
        new = [keys, keys if self.layout.latent else values]
        self._launch_blocks("block_write", [*new, blocks, *self._arrays], len(ids))

    def _make_plan(self, meta: AttentionMetadata, locality: Locality, tile: int, least: int) -> Plan:
        """All decoding sequences together are one shape class with one choice. Every chunk has its own choice."""
        lens = np.asarray(meta.host_query_lens)
        starts = np.concatenate(([0], np.cumsum(lens)))
        contexts = np.asarray(meta.host_context_lens)
        keys = contexts - locality.first_key(contexts - 1)
        decoding = np.flatnonzero(lens == 1)
        members: dict[tuple[bool, int | None], list[int]] = {}
        if decoding.size:
            choice = self.tuning.choice(decode_class(keys[decoding]))
            members[True, choice.partition] = decoding.tolist()
        for i in np.flatnonzero(lens > 1).tolist():
            choice = self.tuning.choice(chunk_class(int(lens[i]), int(keys[i])))
            members.setdefault((False, choice.partition), []).append(i)
        parts: list[PagedPart | ContiguousPart] = []
        for (single, partition), sequences in members.items():
            if partition is None:
                parts += [contiguous_part(meta, i, int(starts[i]), locality) for i in sequences]
            else:
                queries = 1 if single else tile
                schedule = make_schedule(meta, np.asarray(sequences), locality, queries, partition, least)
                parts.append(PagedPart(schedule, single))
        if len(parts) == 1:
            return Plan(parts, None)
        rows = [np.arange(starts[i], starts[i + 1]) for i in itertools.chain(*members.values())]
        return Plan(parts, mx.array(np.argsort(np.concatenate(rows)).astype(np.int32)))

    def _attend_paged(
        self, queries: mx.array, meta: AttentionMetadata, options: Options, part: PagedPart
    ) -> tuple[mx.array, mx.array]:
        """The part's output rows, in the order of its schedule, and the token of its read of the pools."""
        schedule = part.schedule
        heads = queries.shape[1]
        partial = schedule.ranges is not None
        variant = (self._decode if part.single_queries else self._tile)(
            heads // self.num_kv_heads,
            partial,
            options.softcap is not None,
            options.sinks is not None and not partial,
            options.locality.chunk is not None,
        )
        pool_keys, pool_values, last = self._arrays
        sinks = last if options.sinks is None else options.sinks.astype(mx.float32)
        dtype, size = self.layout.dtype, self.layout.value_size
        width = size + 4 if partial else size
        window = min(options.locality.chunk or options.locality.window or NO_WINDOW, NO_WINDOW)
        out, token = kernels.launch(
            variant.name,
            [
                queries,
                pool_keys,
                pool_values,
                meta.block_tables,
                schedule.items,
                sinks,
                float(options.scale),
                *([window] if isinstance(variant, TileVariant) else []),
                float(options.softcap or 1.0),
                last,
            ],
            variant.template,
            grid=(THREADS, self.num_kv_heads * variant.head_tiles, schedule.num_items),
            threadgroup=(THREADS, 1, 1),
            outputs=[((schedule.num_partials, heads, width), mx.float32 if partial else dtype), ((1,), mx.int32)],
            threadgroup_memory=variant.threadgroup_memory,
        )
        if schedule.ranges is None:
            return out, token
        (merged,) = kernels.launch(
            "merge_partials",
            [out, schedule.ranges, sinks],
            [("T", dtype), ("D", size), ("HEADS", heads), ("SINKS", options.sinks is not None)],
            grid=(MERGE_THREADS, heads, schedule.num_rows),
            threadgroup=(MERGE_THREADS, 1, 1),
            outputs=[((schedule.num_rows, heads, size), dtype)],
            threadgroup_memory=MERGE_THREADS // 32 * (size + 2) * 4,
        )
        return merged, token

    def read_context(self, meta: AttentionMetadata) -> mx.array:
        [num_keys] = meta.host_context_lens
        keys, _, self._memory.token = self._gather(mx.array(meta.host_block_tables[0]), num_keys)
        return keys

    def _attend_contiguous(
        self, queries: mx.array, meta: AttentionMetadata, options: Options, part: ContiguousPart
    ) -> tuple[mx.array, mx.array]:
        """The part's output rows, and the token of its read of the pools."""
        keys, values, token = self._gather(part.blocks(meta), part.num_keys)
        if self.layout.latent:
            values = keys[..., : self.layout.value_size]
        by_head = queries[None, part.rows].swapaxes(1, 2)
        out = contiguous_attention(by_head, keys[None], values[None], part.mask, options)
        return out[0].swapaxes(0, 1), token

    def _gather(self, blocks: mx.array, num_keys: int) -> list[mx.array]:
        """The first keys of these blocks and their values, [num_kv_heads, num_keys, size] each, and the token of the
        read. A latent layout has no values."""
        layout, heads = self.layout, self.num_kv_heads
        of_values = (1,) if layout.latent else (heads, num_keys, layout.value_size)
        pool_keys, pool_values, last = self._arrays
        return kernels.launch(
            "kv_gather",
            [pool_keys, pool_values, blocks, last],
            self._row_template,
            grid=(self._vectors, num_keys, heads),
            threadgroup=(self._vectors, min(8, kernels.MAX_THREADS // self._vectors, num_keys), 1),
            outputs=[((heads, num_keys, layout.key_size), layout.dtype), (of_values, layout.dtype), ((1,), mx.int32)],
        )

    def _launch_blocks(
        self, name: str, inputs: Sequence[mx.array], count: int, *outputs: tuple[tuple[int, ...], mx.Dtype]
    ) -> list[mx.array]:
        layout = self.layout
        rows = layout.num_kv_heads * layout.block_size
        vectors = rows * self._vectors
        *results, self._memory.token = kernels.launch(
            name,
            inputs,
            [("T", layout.dtype), ("KEYS", rows * layout.key_size), ("VALUES", rows * layout.stored_value_size)],
            grid=(vectors, count, 1),
            threadgroup=(min(vectors, 256), 1, 1),
            outputs=[*outputs, ((1,), mx.int32)],
        )
        return results


def contiguous_part(meta: AttentionMetadata, sequence: int, first_row: int, locality: Locality) -> ContiguousPart:
    """Copies only the blocks with keys that at least one query token of the sequence sees."""
    query_len, context_len = meta.host_query_lens[sequence], meta.host_context_lens[sequence]
    first_keys = locality.first_key(np.arange(context_len - query_len, context_len))
    first_block = int(first_keys[0]) // meta.block_size
    num_keys = context_len - first_block * meta.block_size
    mask: mx.array | Literal["causal"] = "causal"
    first_keys -= first_block * meta.block_size
    if first_keys[-1] > 0:
        key, query = np.arange(num_keys), np.arange(num_keys - query_len, num_keys)[:, None]
        mask = mx.array((key <= query) & (key >= first_keys[:, None]))
    return ContiguousPart(slice(first_row, first_row + query_len), sequence, first_block, num_keys, mask)


def check_supported(layout: KVLayout) -> None:
    """Raises ValueError if the kernels do not support the layout. The message names what they do not support."""
    for name, size, most, reason in (
        ("keys", layout.key_size, MAX_KEY_SIZE, f"32 lanes hold a key, {MAX_KEY_FLOATS} elements each"),
        ("values", layout.value_size, MAX_VALUE_SIZE, f"{THREADS} threads sum {VECTOR} columns each"),
    ):
        if size % VECTOR:
            raise ValueError(
                f"the Metal kernels take {name} whose size is a multiple of {VECTOR}, because a thread loads {VECTOR} "
                f"elements at once, not {size}"
            )
        if size > most:
            raise ValueError(f"the Metal kernels take {name} of up to {most} elements, because {reason}, not {size}")
    if layout.block_size not in BLOCK_SIZES:
        raise ValueError(
            f"the Metal kernels allow blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not {layout.block_size}"
        )
