"""Decides which kernel attends each part of a step on the Metal backend, by a table from shape classes to choices.

This file defines classes, choices and defaults, and finds the class of a step. tuner.py measures the choices, and
metal.py follows them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import IntArray
from mlxpaged.attention.variants import DecodeVariant, choose_decode

MIN_RANGE = 64
"""Fewest keys per threadgroup of a decoding sequence. Each range of keys costs a row of float32 results per head
(`decode_ranges`)."""

ONE_RANGE = 512
"""Most keys of a decoding sequence that the decode kernel takes as one range, without a kernel that merges: four tiles
for each of a threadgroup's simdgroups. An estimate, no Mac has measured it."""

MAX_RANGES = 64
"""Most ranges of a decoding sequence. Longer contexts have longer ranges."""

CHUNK_PARTITION = 4096
"""Keys per threadgroup for a tile of a prompt chunk: many tiles fill the device, and each range costs memory."""

LONG_CHUNK = 32
LARGE_CHUNK = 65536
"""Query tokens, and query tokens x keys, from which a contiguous copy of a chunk's keys is expected to be worth it: the
copy costs as much as reading the keys once, the paged kernel reads them once per query tile and multiplies without
simdgroup matrices, which MLX's own attention uses (ml-explore/mlx, steel attention). Estimates, no Mac has measured
them."""

BATCHES = (1, 4, 16, 64)
CONTEXTS = (1024, 8192, 32768)
CHUNKS = (31, 127, 255, 2048)
"""Upper bounds of the classes: decoding sequences, keys and query tokens. The last class has no upper bound."""

DECODE_CANDIDATES = (128, 256, 512, 1024, 4096)
SHORT_CHUNK_CANDIDATES = (512, 4096)
CHUNK_CANDIDATES = (4096,)
"""Keys per threadgroup that the tuner times. Chunks that are not short fill the device without a split, and a split
costs memory for each of their tokens."""

MAX_COPIED_SEQUENCES = 4
"""Most decoding sequences for which the tuner times contiguous copies. Copies cost launches and memory per sequence;
with 1,024 keys they beat a paged kernel for 1 sequence and lost for 4 (measured by lablup/mlxcel)."""

EVEN = 0.75
"""A decoding batch is even if its mean context is at least this share of the longest, else ragged: most threadgroups of
a ragged batch finish long before the last."""

MIN_PARTITION = 64
MAX_PARTITION = 2**20
"""Range of N in `--attention-tuning paged:N`. Each range of keys costs a row of float32 results per query and head."""


@dataclass(frozen=True)
class Choice:
    """A paged kernel with `partition` keys per threadgroup; 0: as many as `Ranges` says; None: MLX's own attention
    over a contiguous copy of each sequence's keys. matrix: the matrix kernel, for chunks; None: as many keys per
    threadgroup as matrix.py says. few: a threadgroup of the decode kernel serves half as many query heads."""

    partition: int | None
    matrix: bool = False
    few: bool = False

    def __str__(self) -> str:
        if self.matrix or self.few:
            return "matrix" if self.matrix else "few"
        return "contiguous" if self.partition is None else f"paged:{self.partition}" if self.partition else "paged"

    def num_ranges(self, keys: int, ranges: Ranges) -> int:
        """Ranges of a sequence that sees `keys` keys; 0 if they are copied. ranges: of partition 0."""
        if self.partition is None:
            return 0
        return -(-keys // (self.partition or int(ranges.sizes(np.array(keys)))))


CONTIGUOUS = Choice(None)
MATRIX = Choice(None, matrix=True)
BY_CONTEXT = Choice(0)
FEW = Choice(0, few=True)


@dataclass(frozen=True)
class Ranges:
    """Lengths of the ranges of decoding sequences. whole: most keys of a context that is one range. least: fewest keys
    of a range of longer contexts."""

    least: int
    whole: int = 0

    def sizes(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keys per range of sequences whose token sees `keys` keys. It depends on nothing else in the batch, so that
        the rounding of a sequence's outputs does not depend on the other sequences."""
        cut = np.maximum(self.least, -(-keys // (MAX_RANGES * 32)) * 32)
        return np.where(keys <= self.whole, keys, cut)

    @property
    def most_whole(self) -> int:
        """The most keys that are one range."""
        return max(self.whole, self.least)

    def most_keys(self, size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The most keys of which there are several ranges and for which `sizes` returns `size`."""
        return size // 32 * (MAX_RANGES * 32)


def decode_ranges(layout: KVLayout, group: int) -> Ranges:
    """For `group` query heads of a KV head: ranges of so many keys that to write and read their results takes at most a
    third of the bytes of keys and values, and that each simdgroup of the decode kernel has some."""
    results = 2 * 4 * group * (layout.value_size + 4)
    least = max(MIN_RANGE, -(-3 * results * layout.num_kv_heads // (layout.bytes_per_token * 32)) * 32)
    variant = choose_decode(layout, group)
    if isinstance(variant, DecodeVariant):
        return Ranges(max(least, variant.shortest_range), ONE_RANGE)
    return Ranges(least)


@dataclass(frozen=True)
class ShapeClass:
    """Steps that are expected to have the same fastest choice, by upper bounds.

    queries: tokens of a prompt chunk, 1 for decoding. batch: decoding sequences, 1 for a chunk. context: keys that a
    query of the longest context sees.
    """

    queries: int
    batch: int
    context: int
    ragged: bool = False

    def __str__(self) -> str:
        keys = f"{end(self.context, CONTEXTS)} keys"
        if self.queries > 1:
            return f"chunk {end(self.queries, CHUNKS)}, {keys}"
        if self.batch == 1:
            return f"decode 1, {keys}"
        return f"decode {end(self.batch, BATCHES)}, {keys}, {'ragged' if self.ragged else 'even'}"


def end(bound: int, bounds: tuple[int, ...]) -> str:
    """The range of a class along one axis, as text."""
    return f"to {bound}" if bound < bounds[-1] else f"above {bounds[-2]}"


def upper_end(bounds: tuple[int, ...], value: int) -> int:
    return next((bound for bound in bounds if value <= bound), bounds[-1])


def decode_class(contexts: npt.NDArray[np.int64] | IntArray) -> ShapeClass:
    """The class of a step's decoding sequences. contexts[n]: keys that each one's token sees."""
    longest = int(contexts.max())
    ragged = bool(contexts.mean() < EVEN * longest)
    return ShapeClass(1, upper_end(BATCHES, len(contexts)), upper_end(CONTEXTS, longest), ragged)


def chunk_class(queries: int, context: int) -> ShapeClass:
    """The class of a prompt chunk whose last token sees `context` keys."""
    return ShapeClass(upper_end(CHUNKS, queries), 1, upper_end(CONTEXTS, context))


def default_choice(shape_class: ShapeClass) -> Choice:
    """The choice for the largest step of the class if nothing was measured."""
    if shape_class.queries == 1:
        return BY_CONTEXT
    return default_chunk_choice(shape_class.queries, shape_class.context)


def default_chunk_choice(queries: int, context: int) -> Choice:
    """The choice for a prompt chunk whose last token sees `context` keys if nothing was measured."""
    is_long = queries >= LONG_CHUNK or queries * context > LARGE_CHUNK
    return CONTIGUOUS if is_long else Choice(CHUNK_PARTITION)


def candidate_choices(shape_class: ShapeClass) -> list[Choice]:
    """The choices that the tuner times for a class, the default first."""
    found = [default_choice(shape_class)]
    if shape_class.queries == 1:
        found += [FEW, *map(Choice, DECODE_CANDIDATES)]
    else:
        found += map(Choice, SHORT_CHUNK_CANDIDATES if shape_class.queries == CHUNKS[0] else CHUNK_CANDIDATES)
    if shape_class.queries > 1 or shape_class.batch <= MAX_COPIED_SEQUENCES:
        found.append(CONTIGUOUS)
    if shape_class.queries > 1:
        found.append(MATRIX)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Tuning:
    """A layer's choice for each class: `decode` or `chunks` for all classes of their kind, else the class's entry in
    `choices`, else the default.

    If `choices` differ among decode classes, the rounding of a sequence's outputs depends on the other sequences of the
    batch, because the batch determines the class.
    """

    choices: tuple[tuple[ShapeClass, Choice], ...] = ()
    decode: Choice | None = None
    chunks: Choice | None = None

    def choice(self, shape_class: ShapeClass) -> Choice:
        forced = self.decode if shape_class.queries == 1 else self.chunks
        return forced or self._table.get(shape_class) or default_choice(shape_class)

    @property
    def varies(self) -> bool:
        """Whether the choice for decoding sequences may depend on their number and contexts."""
        return self.decode is None and any(shape_class.queries == 1 for shape_class, _ in self.choices)

    def chunk_choice(self, queries: int, context: int) -> Choice:
        """The choice for a prompt chunk whose last token sees `context` keys."""
        measured = self._table.get(chunk_class(queries, context))
        return self.chunks or measured or default_chunk_choice(queries, context)

    @property
    def uses_matrix(self) -> bool:
        return any(choice.matrix for _, choice in self.choices) or self.chunks == MATRIX

    @property
    def uses_few(self) -> bool:
        return any(choice.few for _, choice in self.choices) or (self.decode is not None and self.decode.few)

    def without_few(self) -> Tuning:
        """The default in all places where the decode kernel with few heads was chosen."""
        choices = tuple((entry, choice) for entry, choice in self.choices if not choice.few)
        return Tuning(choices, None if self.decode is not None and self.decode.few else self.decode, self.chunks)

    def without_matrix(self) -> Tuning:
        """The default in all places where the matrix kernel was chosen."""
        choices = tuple((entry, choice) for entry, choice in self.choices if not choice.matrix)
        return Tuning(choices, self.decode, None if self.chunks == MATRIX else self.chunks)

    @functools.cached_property
    def _table(self) -> dict[ShapeClass, Choice]:
        return dict(self.choices)


DEFAULT_TUNING = Tuning()

AUTO = "auto"


def parse_choice(text: str) -> Choice:
    """Parses "contiguous", "matrix", "few", "paged" or "paged:512". Raises ValueError for anything else."""
    for choice in (CONTIGUOUS, MATRIX, FEW, BY_CONTEXT):
        if text == str(choice):
            return choice
    match = re.fullmatch(r"paged:([0-9]{1,7})", text)
    if match and MIN_PARTITION <= int(match[1]) <= MAX_PARTITION:
        return Choice(int(match[1]))
    partitions = f"paged:N with N from {MIN_PARTITION} to {MAX_PARTITION} keys"
    raise ValueError(f"must be auto, default, contiguous, matrix, few, paged or {partitions}, got {text!r}")


def parse_tuning(text: str) -> Tuning | None:
    """The tuning that `--attention-tuning` asks for; None if it is to be measured. Raises ValueError.

    paged:N applies to decoding. Chunks have ranges of at least the default's size, because shorter ones would cost
    gigabytes for their many tokens. matrix applies to chunks, and decoding has the default.
    """
    if text == AUTO:
        return None
    if text == "default":
        return DEFAULT_TUNING
    choice = parse_choice(text)
    if choice.matrix:
        return Tuning(decode=BY_CONTEXT, chunks=choice)
    if choice.few:
        return Tuning(decode=choice)
    if choice.partition is None:
        return Tuning(decode=choice, chunks=choice)
    return Tuning(decode=choice, chunks=Choice(max(choice.partition, CHUNK_PARTITION)))
