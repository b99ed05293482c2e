"""One launch: arrays in, the runtime called, arrays and counts out.

The structs mirror runtime/runtime.h field by field.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .compiler import Compiled, runtime
from .errors import (
    ArithmeticFault,
    DataRace,
    Divergence,
    MetalRunError,
    Misaligned,
    OutOfBounds,
    ReadOnly,
    ResourceLimit,
    Runaway,
    UninitialisedOutput,
    UninitialisedRead,
)
from .lines import line_of

Bytes = npt.NDArray[Any]

MAX_THREADS_PER_THREADGROUP = 1024
MAX_THREADGROUP_MEMORY = 32768
_MAX_THREADGROUPS = 2**19 - 1  # runtime/shadow.h: bits of a serial
_MAX_REGIONS = 96  # runtime.h: MC_MAX_REGIONS
_POISON = 0xFF

_ERRORS: dict[int, type[MetalRunError]] = {
    1: OutOfBounds,
    2: Misaligned,
    3: ReadOnly,
    4: DataRace,
    5: Divergence,
    6: ResourceLimit,
    7: UninitialisedRead,
    8: ArithmeticFault,
    9: Runaway,
}


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("load_bytes", ctypes.c_uint64),
        ("store_bytes", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
    ]


class _Region(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("granule", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("code_begin", ctypes.c_uint64),
        ("code_end", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("regions", ctypes.POINTER(_Region)),
        ("buffer_count", ctypes.c_uint32),
        ("region_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("checked", ctypes.c_uint32),
        ("threadgroup_memory_limit", ctypes.c_uint32),
        ("seconds", ctypes.c_uint32),
        ("error", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("code_address", ctypes.c_uint64),
        ("index", ctypes.c_int64),
        ("thread", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("where", ctypes.c_char * 64),
        ("message", ctypes.c_char * 1024),
    ]


@dataclass
class Argument:
    """What the kernel sees as parameter `name`: `memory` is the caller's own, or an output to be filled.

    phase: the alignment, modulo 16, that the memory would have on a Mac, where buffers start on a page.
    """

    name: str
    memory: Bytes
    is_constant: bool = False
    is_unwritten: bool = False
    phase: int = 0
    dtype: mx.Dtype | None = None

    @property
    def span(self) -> tuple[int, int]:
        """First and one past the last byte; a strided view spans more than it holds."""
        low = high = self.memory.ctypes.data
        if self.memory.size == 0:
            return low, low
        for size, stride in zip(self.memory.shape, self.memory.strides, strict=True):
            low += min(0, (size - 1) * stride)
            high += max(0, (size - 1) * stride)
        return low, high + self.memory.itemsize


@dataclass(frozen=True)
class LaunchRecord:
    """What a launch did. Per buffer: loads and stores in elements and in bytes, empty if unchecked."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    load_bytes: dict[str, int] = field(default_factory=dict)
    store_bytes: dict[str, int] = field(default_factory=dict)
    threadgroup_memory: int = 0
    barriers: int = 0
    simd_operations: int = 0


def _offset(argument: Argument) -> int:
    """From the lowest byte of the memory to its first element, which differ if strides are negative."""
    return argument.memory.ctypes.data - argument.span[0]


# The runtime's state is static, and ctypes gives the GIL away.
_one_at_a_time = threading.Lock()


def _regions(spans: Sequence[tuple[int, int]], items: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Spans that overlap, joined: (begin, end, smallest item, first buffer)."""
    joined: list[tuple[int, int, int, int]] = []
    for i in sorted(range(len(spans)), key=lambda k: spans[k]):
        begin, end = spans[i]
        if joined and begin < joined[-1][1]:
            last = joined[-1]
            joined[-1] = (last[0], max(last[1], end), min(last[2], items[i]), min(last[3], i))
        else:
            joined.append((begin, end, items[i], i))
    return joined


def launch(
    kernel: str,
    compiled: Compiled,
    source: str,
    arguments: Sequence[Argument],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    *,
    checked: bool,
    seed: int,
    seconds: int,
    cache: Path,
) -> LaunchRecord:
    """Runs every thread of the grid; raises a MetalRunError. Outputs must hold poison already."""
    group = (min(threadgroup[0], grid[0]), min(threadgroup[1], grid[1]), min(threadgroup[2], grid[2]))
    count = 1
    for cells, size in zip(grid, group, strict=True):
        count *= -(-cells // size)
    if checked and count > _MAX_THREADGROUPS:
        raise ResourceLimit(f"{kernel}: {count} threadgroups are more than a checked launch can tell apart")
    # The names in the struct must outlive the call, so keep the encoded ones.
    names = [argument.name.encode() for argument in arguments]
    spans = [argument.span for argument in arguments]
    items = [argument.memory.itemsize for argument in arguments]
    regions = _regions(spans, items)
    if len(regions) > _MAX_REGIONS:
        raise ResourceLimit(f"{kernel}: {len(regions)} buffers")
    record = _Launch()
    buffers = (_Buffer * len(arguments))()
    for i, argument in enumerate(arguments):
        buffers[i].name = names[i]
        buffers[i].host, buffers[i].bytes = spans[i][0], spans[i][1] - spans[i][0]
        buffers[i].item = items[i]
        buffers[i].flags = argument.is_unwritten | argument.is_constant << 1
    table = (_Region * len(regions))()
    for k, (begin, end, item, first) in enumerate(regions):
        table[k].host, table[k].bytes, table[k].granule, table[k].first = begin, end - begin, item, first
        lowest = next(i for i, span in enumerate(spans) if span[0] == begin)
        table[k].phase = (arguments[lowest].phase - _offset(arguments[lowest])) % 16
    record.kernel = kernel.encode()
    record.entry = ctypes.cast(compiled.library.mc_entry, ctypes.c_void_p)
    record.buffers, record.regions = buffers, table
    record.buffer_count, record.region_count = len(buffers), len(table)
    record.grid, record.group = (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*group)
    record.seed, record.checked, record.seconds = seed, checked, seconds
    record.threadgroup_memory_limit = MAX_THREADGROUP_MEMORY
    with _one_at_a_time:
        if runtime(cache).mc_run(ctypes.byref(record)):
            raise MemoryError(f"{kernel}: metal_on_cpu could not reserve its address space")
    if record.error:
        raise _error(kernel, compiled, source, record)
    if checked:
        _check_outputs(kernel, arguments, list(buffers))
    counted = [(argument.name, buffer) for argument, buffer in zip(arguments, buffers, strict=True)] if checked else []
    return LaunchRecord(
        kernel=kernel,
        grid=grid,
        threadgroup=threadgroup,
        loads={name: buffer.load_bytes // buffer.item for name, buffer in counted},
        stores={name: buffer.store_bytes // buffer.item for name, buffer in counted},
        load_bytes={name: buffer.load_bytes for name, buffer in counted},
        store_bytes={name: buffer.store_bytes for name, buffer in counted},
        threadgroup_memory=record.threadgroup_bytes,
        barriers=record.barriers,
        simd_operations=record.simd_operations,
    )


def _error(kernel: str, compiled: Compiled, source: str, record: _Launch) -> MetalRunError:
    message = record.message.decode(errors="replace")
    if record.code_address:
        # A return address: the call before it is what we look for.
        place = line_of(compiled.path, record.code_address - record.code_begin - 1)
        if place:
            message += f" (line {place[1]})" if place[0] == "kernel" else f" (in {place[0]})"
    buffer = record.where.decode(errors="replace") or None
    error = _ERRORS[record.error]
    index = record.index if buffer and error is not ResourceLimit else None
    thread = (record.thread[0], record.thread[1], record.thread[2])
    threadgroup = (record.threadgroup[0], record.threadgroup[1], record.threadgroup[2])
    what = "" if buffer is None else f"{buffer}: " if index is None else f"{buffer}[{index}]: "
    lines = source.splitlines()
    quoted = ""
    for number in dict.fromkeys(int(n) for n in re.findall(r"\bline (\d+)", message)):
        if 0 < number <= len(lines):
            quoted += f"\n  {number:4} | {lines[number - 1]}"
    text = f"{kernel}: {what}{message}; thread {thread} of threadgroup {threadgroup}{quoted}"
    return error(text, buffer=buffer, index=index, thread=thread, threadgroup=threadgroup)


def _check_outputs(kernel: str, arguments: Sequence[Argument], buffers: Sequence[_Buffer]) -> None:
    for argument, buffer in zip(arguments, buffers, strict=True):
        if not argument.is_unwritten:
            continue
        if buffer.unwritten:
            raise UninitialisedOutput(
                f"{kernel}: {buffer.unwritten} of {argument.memory.size} elements of {argument.name} "
                f"were never stored to, the first is {argument.name}[{buffer.first_unwritten}]",
                buffer=argument.name,
                index=int(buffer.first_unwritten),
            )
        _check_poison(kernel, argument)


def _check_poison(kernel: str, argument: Argument) -> None:
    """clang fills uninitialised locals with a NaN of all ones, and arithmetic hands it on to here."""
    if argument.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return
    bits: npt.NDArray[Any] = argument.memory.reshape(-1).view(np.uint32 if argument.dtype == mx.float32 else np.uint16)
    ones = np.iinfo(bits.dtype).max >> 1
    found = np.flatnonzero((bits & ones) == ones)
    if found.size:
        first = int(found[0])
        raise UninitialisedRead(
            f"{kernel}: {argument.name}[{first}] was computed from an uninitialised variable",
            buffer=argument.name,
            index=first,
        )


def poisoned(shape: Sequence[int], dtype: npt.DTypeLike) -> Bytes:
    """An array of a byte pattern that is NaN in every float type. Bools cannot hold it and hold 1."""
    array = np.empty(tuple(shape), dtype)
    array.reshape(-1).view(np.uint8)[:] = 1 if array.dtype == np.bool_ else _POISON
    return array
