"""The swap space: KV blocks outside the pools. The scheduler decides which blocks are copied in and out."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.process_memory import system_free_memory

PIECE_BYTES = 64 * 2**20
"""Most bytes of all layers that are copied at once, so that a call needs a small multiple of this memory, however many
blocks it moves. A piece holds many slots, so a call seldom waits for the device."""

DAY_SECONDS = 86_400

Bytes = npt.NDArray[np.uint8]

Like = tuple[tuple[int, ...], mx.Dtype]
"""Shape and type of an array."""


class SwapSpaceError(OSError):
    """The directory cannot hold the swap file. The message names the directory and the size."""


def bytes_per_slot(layers: Sequence[LayerKVCache]) -> int:
    """Bytes of one KV block of every layer."""
    return sum(kv.layout.bytes_per_block for kv in layers)


def copy_in_pieces(layers: Sequence[LayerKVCache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, source to target, in one layer after the other. The copies are done on return."""
    for kv in layers if pairs else ():
        count = max(1, PIECE_BYTES // kv.layout.bytes_per_block)
        for start in range(0, len(pairs), count):
            kv.copy_blocks(pairs[start : start + count])
            mx.eval(kv.arrays)


def read_bytes(layers: Sequence[LayerKVCache], blocks: Sequence[int]) -> list[mx.array]:
    """The bytes of blocks, not evaluated: an array for each plane of each layer."""
    return [array.view(mx.uint8) for kv in layers for array in kv.read_blocks(blocks)]


def write_bytes(layers: Sequence[LayerKVCache], blocks: Sequence[int], columns: Sequence[Bytes]) -> None:
    """Overwrite blocks. columns: [n, bytes] for each plane of each layer, of memory that stays as it is meanwhile."""
    rest = iter(columns)
    for kv in layers:
        pieces = [(mx.array(np.ascontiguousarray(next(rest))), plane) for plane in kv.layout.planes]
        planes = [piece.view(plane.dtype).reshape(-1, *plane.shape) for piece, plane in pieces]
        kv.write_blocks(blocks, *planes)


def split_columns(layers: Sequence[LayerKVCache], rows: Bytes) -> list[Bytes]:
    """Views of rows [n, bytes of a block of all layers]: one for each plane of each layer."""
    ends = np.cumsum([plane.nbytes for kv in layers for plane in kv.layout.planes])
    return np.split(rows, ends[:-1], axis=1)


def flat_bytes(array: mx.array) -> mx.array:
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def arrays_of(data: Bytes, likes: Iterable[Like]) -> Iterator[mx.array]:
    """Arrays of these shapes and types, not evaluated, whose bytes follow one another."""
    first = 0
    for shape, dtype in likes:
        last = first + math.prod(shape) * int(dtype.size)
        yield mx.array(data[first:last]).view(dtype).reshape(shape)
        first = last


class WrittenBytes:
    """Counts the bytes that are written to a disk: since the start, and today in UTC. clock: Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.total = 0
        self._before_today, self._day = 0, self._now()

    def add(self, size: int) -> None:
        self._begin_day()
        self.total += size

    @property
    def today(self) -> int:
        self._begin_day()
        return self.total - self._before_today

    def _begin_day(self) -> None:
        """A clock that is set back begins no day."""
        if self._now() > self._day:
            self._before_today, self._day = self.total, self._now()

    def _now(self) -> int:
        return int(self._clock() // DAY_SECONDS)


class SwapSpace:
    """`num_slots` slots, each for one KV block of all `layers`; 0: there is no swap space. They hold bytes, because
    NumPy has no bfloat16. A slot is contiguous: the planes of the first layer (KVLayout.planes), those of the second,
    and so on.

    Without a directory the slots are ordinary memory, which the system commits when slots are first written. On Apple
    Silicon it is the same memory as the pools', but it is not wired and not part of the GPU's working set, which runs
    out first. With a directory the slots are a memory-mapped file in it. written: bytes that went into this file.

    Belongs to the thread of the layers. Raises ValueError if the layers differ in the number or size of their blocks,
    MemoryError if less memory is free than the slots need, SwapSpaceError if the directory cannot be used.
    """

    def __init__(self, layers: Sequence[LayerKVCache], num_slots: int, directory: Path | None = None) -> None:
        if num_slots and len({(kv.num_blocks, kv.layout.block_size) for kv in layers}) != 1:
            raise ValueError("the layers of a swap space must have equally many blocks of equally many tokens")
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self.num_slots = num_slots
        self.nbytes = num_slots * bytes_per_slot(layers)
        self.written = WrittenBytes()
        self._is_file = directory is not None
        self._layers = list(layers)
        self._memory: Bytes | None = None
        self._columns: list[Bytes] = []
        if num_slots:
            memory = map_memory(self.nbytes) if directory is None else map_file(self.nbytes, directory)
            self._memory = memory.reshape(num_slots, -1)
            self._columns = split_columns(layers, self._memory)
        self._likes: dict[int, list[Like]] = {}  # by the first of their slots: shapes and types of arrays

    def store(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to slot for every (block, slot). The blocks may be overwritten once this returns.

        Raises ValueError, before anything is copied, if a block or slot is out of range or a slot is written twice.
        """
        self._check([block for block, _ in pairs], [slot for _, slot in pairs], written="slot")
        for blocks, slots in self._pieces(pairs):
            read = read_bytes(self._layers, blocks)
            mx.eval(read)  # one wait for all layers
            for column, array in zip(self._columns, read, strict=True):
                column[slots] = np.asarray(array).reshape(len(slots), column.shape[1])
            self._note(len(slots) * bytes_per_slot(self._layers))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slot to block for every (slot, block). The slots keep their contents. The copies are done on return.

        Raises ValueError, before anything is copied, if a block or slot is out of range or a block is written twice.
        """
        self._check([block for _, block in pairs], [slot for slot, _ in pairs], written="block")
        for slots, blocks in self._pieces(pairs):
            write_bytes(self._layers, blocks, [column[slots] for column in self._columns])
            mx.eval([kv.arrays for kv in self._layers])  # frees the piece's copies before the next piece makes its own

    def store_arrays(self, slots: Sequence[int], arrays: Sequence[mx.array]) -> None:
        """Copy arrays into slots, one after the other, for as many bytes as they have."""
        assert self._memory is not None
        mx.eval(arrays)
        self._likes[slots[0]] = [(array.shape, array.dtype) for array in arrays]
        data, size = np.concatenate([np.asarray(flat_bytes(array)) for array in arrays]), self._memory.shape[1]
        for i, slot in enumerate(slots):
            piece = data[i * size : (i + 1) * size]
            self._memory[slot, : len(piece)] = piece
        self._note(len(data))

    def load_arrays(self, slots: Sequence[int]) -> list[mx.array]:
        """The arrays that `store_arrays` has copied into the slots."""
        assert self._memory is not None
        arrays = list(arrays_of(self._memory[list(slots)].reshape(-1), self._likes[slots[0]]))
        mx.eval(arrays)
        return arrays

    def close(self) -> None:
        """Free the memory or the file. Closing twice is no error."""
        self._memory, self._columns = None, []  # the only references to the mapping, which has the only one to the file

    def _note(self, size: int) -> None:
        if self._is_file:
            self.written.add(size)

    def _check(self, blocks: Sequence[int], slots: Sequence[int], written: str) -> None:
        if not slots:
            return
        if not self._columns:
            raise ValueError("the swap space is closed, or has no slots")
        for name, ids, count in (("block", blocks, self._layers[0].num_blocks), ("slot", slots, self.num_slots)):
            for number in ids:
                if not isinstance(number, int) or not 0 <= number < count:
                    raise ValueError(f"{name} {number} is out of range: there are {count}")
            if name == written and len(set(ids)) != len(ids):
                raise ValueError(f"a {name} is written twice: {ids}")

    def _pieces(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        """Sources and targets, in pieces of PIECE_BYTES or one pair, whichever is more."""
        count = max(1, PIECE_BYTES // max(1, bytes_per_slot(self._layers)))
        for start in range(0, len(pairs), count):
            piece = pairs[start : start + count]
            yield [source for source, _ in piece], [target for _, target in piece]


def map_memory(size: int) -> Bytes:
    """Memory that is not committed yet. Raises MemoryError if the machine has less free.

    It is mapped: malloc could place it among other allocations, and glibc might keep it after it is freed.
    """
    free = system_free_memory()  # the system would grant more, and kill the process when the slots are written
    if size > free:
        raise MemoryError(f"--swap-space takes {size / 1e6:.1f} MB, but only {free / 1e6:.1f} MB of memory are free")
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE), np.uint8)


def map_file(size: int, directory: Path) -> Bytes:
    """A new file in `directory`, mapped into memory. Raises SwapSpaceError.

    The file has no name (from the start if the system supports that, else it is unlinked after it was opened), so that
    its space is freed however the process ends, kill -9 included, and no other process can open the conversations in
    it. A write to a mapped file on a full disk ends the process with SIGBUS, so the space is reserved here.
    """
    try:
        free = shutil.disk_usage(directory).free  # checked first: a failed reservation has already filled the disk
        if size > free:
            raise OSError(f"only {free / 1e6:.1f} MB are free")
        with tempfile.TemporaryFile(prefix="mlxpaged-swap-", dir=directory) as file:  # mode 0600
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS cannot reserve space, so other processes may still take it
                os.ftruncate(file.fileno(), size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)  # the mapping keeps the file
    except OSError as error:
        raise SwapSpaceError(
            f"no room for a swap file of {size / 1e6:.1f} MB in {directory}: {error.strerror or error}"
        ) from error
