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
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention import kernels, matrix
from mlxpaged.attention.gather import contiguous_attention
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, IntArray, Planner, Upload, distinct_rows, padded
from mlxpaged.attention.pool import Locality, Memory, Options
from mlxpaged.attention.qkv import Qkv
from mlxpaged.attention.tile_schedule import TileSchedule, make_schedule
from mlxpaged.attention.tuning import DEFAULT_TUNING, Choice, Ranges, Tuning, decode_class, decode_ranges
from mlxpaged.attention.variants import (
    BLOCK_SIZES,
    FULL_DEVICE,
    MAX_KEY_FLOATS,
    MAX_KEY_SIZE,
    MAX_VALUE_SIZE,
    THREADS,
    VECTOR,
    DecodeVariant,
    choose_decode,
    choose_tile,
    quantization_template,
)
from mlxpaged.core.step import Step

MERGE_THREADS = 256

HEADS_AT_ONCE = 8
"""Heads of a threadgroup of qkv_write."""

NO_WINDOW = 2**30

SCALES = 2
"""The plane of scales, the last input of kernels for quantized pools."""


@dataclass(frozen=True)
class PagedPart:
    """One launch of a paged kernel, or if `matrix` of the matrix kernel. single_queries: all its sequences decode.
    mutual: it has images whose tokens see one another. few: as in Choice."""

    schedule: TileSchedule
    single_queries: bool
    matrix: bool = False
    mutual: bool = False
    few: bool = False


@dataclass(frozen=True)
class ContiguousPart:
    """One sequence: query tokens from first_row on, over the first num_keys keys of its blocks from `first_block` on,
    which are copied. masked: whether a query sees other keys than all up to itself."""

    first_row: int
    num_rows: int
    sequence: int
    first_block: int
    num_keys: int
    masked: bool

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    def blocks(self, meta: AttentionMetadata) -> mx.array:
        key = ("metal blocks", self.sequence, self.first_block)
        if key not in meta.derived:
            meta.derived[key] = padded(meta.block_tables[self.sequence, self.first_block :])
        blocks: mx.array = meta.derived[key]
        return blocks

    def mask(self, meta: AttentionMetadata, locality: Locality) -> mx.array | Literal["causal"]:
        if not self.masked:
            return "causal"
        key = ("metal mask", self, locality)
        if key not in meta.derived:
            context_len = self.first_block * meta.block_size + self.num_keys
            keys = mx.arange(context_len - self.num_keys, context_len)
            first = locality.first_key(np.arange(context_len - self.num_rows, context_len, dtype=np.int32))
            last = locality.last_keys(meta.step, self.sequence)
            # On the device: numpy took 0.5 s for 2,048 queries and 32,768 keys.
            meta.derived[key] = (keys <= mx.array(last)[:, None]) & (keys >= mx.array(first)[:, None])
        mask: mx.array = meta.derived[key]
        return mask


@dataclass(frozen=True)
class Plan:
    """How the query tokens of a step attend: one launch for the decoding sequences, one for the chunks of each kernel
    and partition, and one contiguous part for each sequence whose keys are copied.

    order: index in the step's upload of what puts the parts' outputs back in the order of the query tokens; None if
    there is one part. decode: the choice for the decoding sequences, which may depend on their contexts.
    """

    parts: tuple[PagedPart | ContiguousPart, ...]
    order: int | None
    decode: Choice | None = field(default=None, compare=False)


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
        self._matrix = functools.cache(functools.partial(matrix.choose_variant, layout))
        self._ranges = functools.cache(functools.partial(decode_ranges, layout))
        self.planner = functools.cache(self._planner)
        self._sinks: tuple[mx.array, mx.array] | None = None
        self._quantized = layout.quantization is not None
        self._values = 0 if layout.latent else 1  # the plane
        self._vectors = max(layout.key_size, layout.stored_value_size) // VECTOR
        self._row_template: kernels.Template = [
            ("T", layout.dtype),
            ("DK", layout.key_size),
            ("DV", layout.stored_value_size),
            ("KV_HEADS", layout.num_kv_heads),
            ("BLOCK", layout.block_size),
            *quantization_template(layout),
        ]

    @property
    def _arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """What kernels get for keys and values, and the token."""
        memory = self._memory
        assert memory.token is not None
        return memory.bound[0], memory.bound[self._values], memory.token

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        if self._quantized:
            self._quantize(keys, values, meta)
            return
        template, vectors = self._written
        (self._memory.token,) = kernels.launch(
            "kv_write",
            [keys, values, meta.padded_slots, *self._arrays],
            template,
            grid=(vectors, self.num_kv_heads, meta.num_written),
            threadgroup=(vectors, 1, 1),
            outputs=[((1,), mx.int32)],
        )

    @functools.cached_property
    def _written(self) -> tuple[kernels.Template, int]:
        """The template of kv_write, and the vectors of a row that a thread each writes."""
        layout, sizes = self.layout, self.layout.input_sizes
        pitches = layout.key_size, layout.key_size if layout.latent else layout.value_size
        template: kernels.Template = [
            ("T", layout.dtype),
            *zip(("DK", "DV", "KEY_PITCH", "VALUE_PITCH"), (*sizes, *pitches), strict=True),
            ("VALUE_START", layout.value_size if layout.latent else 0),
            ("KV_HEADS", self.num_kv_heads),
            ("BLOCK", layout.block_size),
        ]
        return template, max(sizes) // VECTOR

    def _quantize(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        (self._memory.token,) = kernels.launch(
            "kv_quantize",
            [keys, values, meta.padded_slots, *self._arrays, self._memory.bound[SCALES]],
            self._row_template,
            grid=(32, self.num_kv_heads, meta.num_written),
            threadgroup=(32, 1, 1),
            outputs=[((1,), mx.int32)],
            quantized=True,
        )

    def write_rows(self, rows: mx.array, qkv: Qkv, meta: AttentionMetadata) -> mx.array:
        """Does what `LayerKVCache.write_rows` says, in one kernel."""
        kind, size = qkv.kind, self.layout.key_size
        weights = [rows, rows] if qkv.norms is None else [norm.weight for norm in qkv.norms]
        freqs = None if qkv.rope is None else qkv.rope.freqs
        heads = kind.num_query_heads + 2 * self.num_kv_heads
        rows_at_once = min(HEADS_AT_ONCE, heads)
        queries, self._memory.token = kernels.launch(
            "qkv_write",
            [
                rows,
                meta.positions,
                meta.padded_slots,
                meta.num_written,
                *weights,
                rows if freqs is None else freqs,
                qkv.settings,
                *self._arrays,
                *(self._memory.bound[SCALES:] if self._quantized else ()),
            ],
            [
                *self._row_template,
                ("HEADS", kind.num_query_heads),
                ("ROTATED", kind.rotated),
                ("TRADITIONAL", kind.traditional),
                ("FREQUENCIES", kind.frequencies),
                ("NORMS", kind.norms),
                ("GATED", kind.gated),
                *([("ROWS", rows_at_once)] if self._quantized else []),
            ],
            grid=(32, heads, len(rows)),
            threadgroup=(32, rows_at_once, 1),
            outputs=[((len(rows), kind.num_query_heads, size), self.layout.dtype), ((1,), mx.int32)],
            threadgroup_memory=rows_at_once * size * self.layout.dtype.size if self._quantized else 0,
            quantized=self._quantized,
        )
        return queries

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        plan: Plan = meta.plan(self.planner(queries.shape[1], options.locality))
        outputs, tokens = [], []
        for part in plan.parts:
            if isinstance(part, PagedPart):
                out, token = self._attend_paged(queries, meta, options, part)
            else:
                out, token = self._attend_contiguous(options.whole(queries), meta, options, part)
            outputs.append(out)
            tokens.append(token)
        self._memory.order_after(*tokens)
        return outputs[0] if plan.order is None else mx.concatenate(outputs)[meta.arrays[plan.order]]

    def _planner(self, num_query_heads: int, locality: Locality) -> Planner:
        """What plans the attention of these layers. The result is kept as `planner`."""
        group = num_query_heads // self.num_kv_heads
        of_matrix = self._matrix(group)
        tile, ranges = self._tile(group).queries, self._ranges(group)
        matrix_tile = None if of_matrix is None else of_matrix.tile
        key = ("metal", locality, tile, matrix_tile, ranges, id(self.tuning))  # one plan for all layers with these
        return Planner(key, functools.partial(self._make_plan, key[1:5]), functools.partial(self._grow_plan, locality))

    def _make_plan(
        self,
        sizes: tuple[Locality, int, matrix.QueryTile | None, Ranges],
        step: Step,
        upload: Upload,
    ) -> Plan:
        """All decoding sequences together are one shape class with one choice. Every chunk has its own choice.

        A tile of a batch-invariant engine has no choice: the ranges of a row depend on its own context alone."""
        locality, tile, matrix_tile, ranges = sizes
        if step.num_repeats is not None:
            distinct = distinct_rows(step)
            members_of_tile = np.unique(distinct).astype(np.int64)
            schedule = make_schedule(step, members_of_tile, locality, 1, ranges, upload, always_merge=True)
            return Plan((PagedPart(schedule, single_queries=True),), upload.add(distinct))
        lens = np.asarray(step.query_lens)
        starts = np.concatenate(([0], np.cumsum(lens)))
        contexts = np.asarray(step.context_lens)
        keys = contexts - locality.first_key(contexts - 1)
        decoding = np.flatnonzero(lens == 1)
        members: dict[tuple[bool, Choice], list[int]] = {}
        if decoding.size:
            members[True, self._decode_choice(keys[decoding])] = decoding.tolist()
        for i in np.flatnonzero(lens > 1).tolist():
            choice = self.tuning.chunk_choice(int(lens[i]), int(keys[i]))
            if choice.matrix:
                choice = matrix.with_partition(choice, matrix_tile, int(lens[i]), int(keys[i]))
            members.setdefault((False, choice), []).append(i)
        parts: list[PagedPart | ContiguousPart] = []
        for (single, choice), sequences in members.items():
            if choice.partition is None:
                parts += [contiguous_part(step, i, int(starts[i]), locality, self.layout.block_size) for i in sequences]
            else:
                queries = 1 if single else matrix_tile.queries if choice.matrix and matrix_tile else tile
                members_of_part = np.asarray(sequences)
                schedule = make_schedule(step, members_of_part, locality, queries, choice.partition or ranges, upload)
                mutual = locality.looks_ahead(step, sequences)
                parts.append(PagedPart(schedule, single, choice.matrix, mutual, choice.few))
        if len(parts) == 1:
            return Plan(tuple(parts), None, self._decode_choice(keys[decoding]) if decoding.size else None)
        rows = [np.arange(starts[i], starts[i + 1]) for i in itertools.chain(*members.values())]
        return Plan(tuple(parts), upload.add(np.argsort(np.concatenate(rows)).astype(np.int32)))

    def _decode_choice(self, keys: npt.NDArray[np.int64]) -> Choice:
        """keys: that each decoding sequence sees."""
        return self.tuning.choice(decode_class(keys))

    def _grow_plan(self, locality: Locality, plan: Plan, step: Step, arrays: Sequence[IntArray], steps: int) -> bool:
        """Does what `Planner.grow` says."""
        [part, *others] = plan.parts
        if others or not isinstance(part, PagedPart) or part.schedule.growth is None:
            return False
        moving, most_steps = part.schedule.growth
        if steps > most_steps:
            return False
        if self.tuning.varies:
            contexts = np.asarray(step.context_lens)
            if self._decode_choice(contexts - locality.first_key(contexts - 1)) != plan.decode:
                return False
        arrays[part.schedule.items].reshape(-1)[moving] += 1
        return True

    def _attend_paged(
        self, queries: mx.array, meta: AttentionMetadata, options: Options, part: PagedPart
    ) -> tuple[mx.array, mx.array]:
        """The part's output rows, in the order of its schedule, and the token of its read of the pools."""
        schedule = part.schedule
        heads = queries.shape[1]
        partial = schedule.ranges is not None
        flags = (
            partial,
            options.softcap is not None,
            options.sinks is not None and not partial,
            options.locality.chunk is not None,
            part.mutual,
        )
        group = heads // self.num_kv_heads
        of_matrix = self._matrix(group, *flags) if part.matrix else None
        variant = of_matrix or (self._decode if part.single_queries else self._tile)(group, *flags)
        if isinstance(variant, DecodeVariant):
            simdgroups = variant.threads // 32 * self.num_kv_heads * variant.head_tiles * schedule.num_items
            variant = self._decode(group, *flags, by_head=simdgroups < FULL_DEVICE, few=part.few)
        pool_keys, pool_values, last = self._arrays
        sinks = last if options.sinks is None else self._float_sinks(options.sinks)
        dtype, size = self.layout.dtype, self.layout.value_size
        width = size + 4 if partial else size
        window = min(options.locality.chunk or options.locality.window or NO_WINDOW, NO_WINDOW)
        out, token = kernels.launch(
            variant.name,
            [
                queries,
                *([pool_keys, pool_values] if options.q_pe is None else [options.q_pe, pool_keys]),
                meta.block_tables,
                meta.arrays[schedule.items],
                sinks,
                float(options.scale),
                *([] if isinstance(variant, DecodeVariant) else [window]),
                float(options.softcap or 1.0),
                last,
                *(self._memory.bound[SCALES:] if self._quantized else ()),
            ],
            variant.template,
            grid=(variant.threads, self.num_kv_heads * variant.head_tiles, schedule.num_items),
            threadgroup=(variant.threads, 1, 1),
            outputs=[((schedule.num_partials, heads, width), mx.float32 if partial else dtype), ((1,), mx.int32)],
            threadgroup_memory=variant.threadgroup_memory,
            quantized=self._quantized,
        )
        if schedule.ranges is None:
            return out, token
        (merged,) = kernels.launch(
            "merge_partials",
            [out, meta.arrays[schedule.ranges], sinks],
            [("T", dtype), ("D", size), ("HEADS", heads), ("SINKS", options.sinks is not None)],
            grid=(MERGE_THREADS, heads, schedule.num_rows),
            threadgroup=(MERGE_THREADS, 1, 1),
            outputs=[((schedule.num_rows, heads, size), dtype)],
            threadgroup_memory=MERGE_THREADS // 32 * (size + 2) * 4,
        )
        return merged, token

    def _float_sinks(self, sinks: mx.array) -> mx.array:
        """A model passes the same array in every step, so it is converted once."""
        if self._sinks is None or self._sinks[0] is not sinks:
            self._sinks = sinks, sinks.astype(mx.float32)
        return self._sinks[1]

    def read_context(self, meta: AttentionMetadata) -> mx.array:
        [num_keys] = meta.step.context_lens
        keys, _, self._memory.token = self._gather(meta.block_tables[0, :], num_keys)
        return keys

    def _attend_contiguous(
        self, queries: mx.array, meta: AttentionMetadata, options: Options, part: ContiguousPart
    ) -> tuple[mx.array, mx.array]:
        """The part's output rows, and the token of its read of the pools."""
        keys, values, token = self._gather(part.blocks(meta), part.num_keys)
        if self.layout.latent:
            values = keys[..., : self.layout.value_size]
        by_head = queries[None, part.rows].swapaxes(1, 2)
        out = contiguous_attention(by_head, keys[None], values[None], part.mask(meta, options.locality), options)
        return out.squeeze(0).swapaxes(0, 1), token  # out[0] would be a gather, whose copy a reshape copies again

    def _gather(self, blocks: mx.array, num_keys: int) -> list[mx.array]:
        """The first keys of these blocks and their values, [num_kv_heads, num_keys, size] each, and the token of the
        read. A latent layout has no values."""
        layout, heads = self.layout, self.num_kv_heads
        of_values = (1,) if layout.latent else (heads, num_keys, layout.value_size)
        pool_keys, pool_values, last = self._arrays
        return kernels.launch(
            "kv_gather",
            [pool_keys, pool_values, blocks, last, *(self._memory.bound[SCALES:] if self._quantized else ())],
            self._row_template,
            grid=(self._vectors, num_keys, heads),
            threadgroup=(self._vectors, min(8, kernels.MAX_THREADS // self._vectors, num_keys), 1),
            outputs=[((heads, num_keys, layout.key_size), layout.dtype), (of_values, layout.dtype), ((1,), mx.int32)],
            quantized=self._quantized,
        )


def contiguous_part(step: Step, sequence: int, first_row: int, locality: Locality, block_size: int) -> ContiguousPart:
    """Copies only the blocks with keys that at least one query token of the sequence sees."""
    query_len, context_len = step.query_lens[sequence], step.context_lens[sequence]
    first_keys = locality.first_key(np.arange(context_len - query_len, context_len))
    first_block = int(first_keys[0]) // block_size
    num_keys = context_len - first_block * block_size
    masked = int(first_keys[-1]) > first_block * block_size or locality.looks_ahead(step, [sequence])
    return ContiguousPart(first_row, query_len, sequence, first_block, num_keys, masked)


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
