"""Which way each part of a step takes on the Metal backend: a table from shape classes to choices.

Here: what a class and a choice are, how a step finds its class, and the choices where nothing was measured. tuner.py
measures others, metal.py follows them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxpaged.attention.metadata import IntArray

DECODE_PARTITION = 512
"""Keys that one threadgroup attends to for a decoding sequence; vLLM's and mistral.rs's number."""

CHUNK_PARTITION = 4096
"""The same for a tile of a prompt chunk: many tiles fill the device already, and every range of one costs memory."""

LONG_CHUNK = 128
"""Query tokens from which a chunk is worth a contiguous copy of its keys for MLX's own attention: the copy costs as
much as reading the keys once, the paged kernel reads them once per tile of queries, and MLX's is near the device's peak
there (ml-explore/mlx, steel attention)."""

BATCHES = (1, 4, 16, 64)
CONTEXTS = (1024, 8192, 32768)
CHUNKS = (31, LONG_CHUNK - 1, 255, 2048)
"""Upper ends of the classes of decoding sequences, keys and query tokens. The last of each stands for all beyond."""

EVEN = 0.75
"""Decoding sequences whose mean context is at least this share of the longest are an even batch, others a ragged one:
most threadgroups of a ragged batch are done long before the last."""

MIN_PARTITION = 64
MAX_PARTITION = 2**20
"""What `--attention-tuning paged:N` takes. Every range of keys costs a row of float32 results per query and head."""


@dataclass(frozen=True)
class Choice:
    """The paged kernel with `partition` keys to a threadgroup, or, for None, a contiguous copy of each sequence's keys
    for MLX's own attention."""

    partition: int | None

    def __str__(self) -> str:
        return "contiguous" if self.partition is None else f"paged:{self.partition}"


CONTIGUOUS = Choice(None)


@dataclass(frozen=True)
class ShapeClass:
    """Attention that is taken to run alike, by upper ends.

    queries: tokens of a prompt chunk, 1 for decoding. batch: sequences that decode; chunks are looked up one by one and
    have 1. context: keys that a query sees, the longest context's.
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
    """A class in words, by its upper end."""
    return f"to {bound}" if bound < bounds[-1] else f"above {bounds[-2]}"


def upper_end(bounds: tuple[int, ...], value: int) -> int:
    return next((bound for bound in bounds if value <= bound), bounds[-1])


def decode_class(contexts: npt.NDArray[np.int64] | IntArray) -> ShapeClass:
    """The class of the sequences of a step that decode; contexts[n]: keys that each one's token sees."""
    longest = int(contexts.max())
    ragged = bool(contexts.mean() < EVEN * longest)
    return ShapeClass(1, upper_end(BATCHES, len(contexts)), upper_end(CONTEXTS, longest), ragged)


def chunk_class(queries: int, context: int) -> ShapeClass:
    """The class of a prompt chunk whose last token sees `context` keys."""
    return ShapeClass(upper_end(CHUNKS, queries), 1, upper_end(CONTEXTS, context))


def default_choice(shape_class: ShapeClass) -> Choice:
    """Where nothing was measured."""
    if shape_class.queries == 1:
        return Choice(DECODE_PARTITION)
    return Choice(CHUNK_PARTITION) if shape_class.queries < LONG_CHUNK else CONTIGUOUS


@dataclass(frozen=True)
class Tuning:
    """What a layer's pool does for each class: what `decode` and `chunks` say for all classes of their kind, else the
    class's entry of `choices`, else the default.

    With `choices` that differ among decode classes, a sequence's answer may differ in rounding with who else is in the
    batch, because the batch picks the class. Without, it does not.
    """

    choices: tuple[tuple[ShapeClass, Choice], ...] = ()
    decode: Choice | None = None
    chunks: Choice | None = None

    def __hash__(self) -> int:
        return self._hash

    def choice(self, shape_class: ShapeClass) -> Choice:
        forced = self.decode if shape_class.queries == 1 else self.chunks
        return forced or self._table.get(shape_class) or default_choice(shape_class)

    @functools.cached_property
    def _table(self) -> dict[ShapeClass, Choice]:
        return dict(self.choices)

    @functools.cached_property
    def _hash(self) -> int:
        """Kept: every layer of every step looks its plan up by its tuning."""
        return hash((self.choices, self.decode, self.chunks))


DEFAULT_TUNING = Tuning()

AUTO = "auto"


def parse_choice(text: str) -> Choice:
    """Of "contiguous" or "paged:512". Raises ValueError for anything else."""
    name, _, number = text.partition(":")
    if text == "contiguous":
        return CONTIGUOUS
    if name == "paged" and number.isascii() and number.isdigit() and len(number) <= len(str(MAX_PARTITION)):
        partition = int(number)
        if MIN_PARTITION <= partition <= MAX_PARTITION:
            return Choice(partition)
    partitions = f"paged:N with N from {MIN_PARTITION} to {MAX_PARTITION} keys"
    raise ValueError(f"must be auto, default, contiguous or {partitions}, got {text!r}")


def parse_tuning(text: str) -> Tuning | None:
    """The tuning that `--attention-tuning` asks for, None where it leaves it to measurements. Raises ValueError.

    paged:N is for decoding; of a chunk's many tokens, ranges shorter than the default's would cost gigabytes.
    """
    if text == AUTO:
        return None
    if text == "default":
        return DEFAULT_TUNING
    choice = parse_choice(text)
    if choice.partition is None:
        return Tuning(decode=choice, chunks=choice)
    return Tuning(decode=choice, chunks=Choice(max(choice.partition, CHUNK_PARTITION)))
