"""Counts the Metal command buffers and barriers that MLX makes of a step, by MLX's own rules. A boundary between two
command buffers costs about 20 us of GPU time (ml-explore/mlx#4521).

    python benchmarks/command_buffers.py [MODEL]

prints the command buffers of a decode step. It needs a Mac: elsewhere MLX composes its fused functions of many small
operations. tests/attention/step_counts.py counts the steps of seven known models anywhere.

MLX commits a command buffer after the operation with which the buffer's dispatches, or the elements of the arrays bound
to it, pass a limit. A buffer of memory counts once for each command buffer, with the `data_size` of the array that
binds it first. At the end of `eval` or `async_eval` it commits once more. An array that a command buffer reads is freed
when that has ended, and the host goes on while up to IN_FLIGHT of them run. A barrier comes before a dispatch that
reads what an earlier one of the command buffer has written since the last barrier, or that writes what it has read. The
sources are mlx/backend/metal/device.cpp (`set_input_array`, `register_output_array`,
`maybeInsertBarrier`, `needs_commit`, `commit`, the constructor of `Device`), mlx/backend/metal/eval.cpp, and
mlx/transforms.cpp (`MAX_ACTIVE_TASKS`) of MLX 0.32.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.core.step import Row
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.loader import ServedModel, load_model

MIB = 2**20


@dataclass(frozen=True)
class CommitLimits:
    """A command buffer is committed if it has more than `ops` dispatches, or (mib + 1) * 2^20 elements or more. MLX
    compares elements, although the names of its variables say megabytes."""

    ops: int
    mib: int


def commit_limits(architecture: str) -> CommitLimits:
    """MLX's limits by the last letter of `mx.device_info()["architecture"]`: p is a phone, g a base or Pro chip, s a
    Max, d an Ultra."""
    return {"p": CommitLimits(20, 40), "s": CommitLimits(50, 50), "d": CommitLimits(50, 50)}.get(
        architecture[-1:], CommitLimits(40, 40)
    )


@dataclass(frozen=True)
class Operation:
    """One primitive of a step's graph. bound: the elements of each array that it binds, by the buffer of memory.
    written: the buffers that it writes. bytes_read: of the arrays that it reads. made: the bytes of buffers that it
    writes first. last_read: buffers that no later operation reads. donates: whether its output may take the memory of
    one of these."""

    name: str
    dispatches: int
    bound: Mapping[str, int]
    written: Collection[str] = ()
    bytes_read: int = 0
    made: Mapping[str, int] = field(default_factory=dict)
    last_read: Collection[str] = ()
    donates: bool = False


IN_FLIGHT = 10
"""Command buffers that run while the host makes the next one."""

DONATING = frozenset(
    [
        *("Add", "AsType", "Divide", "Maximum", "Minimum", "Multiply", "Negative", "Power", "RMSNorm", "RoPE"),
        *("Select", "Sigmoid", "Softmax", "Square", "Subtract", "Tanh"),
        *("rms_norm", "rope"),  # of tests/attention/step_graphs.py
    ]
)
"""Primitives whose output takes the memory of an input of as many bytes that nothing else reads or has read."""


VIEWS = frozenset(
    [
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Copy",
        "CustomTransforms",
        "Depends",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    ]
)
"""Primitives that launch nothing: their output shares the buffer of their first input (mlx/backend/gpu/primitives.cpp).
Reshapes copy if no strides describe the result; in a decode step they do."""

SMALLER_VIEWS = frozenset(("Slice", "Split"))
"""Views that bind fewer elements than their input. A slice counts its own elements, although MLX counts the gaps
between its rows too."""

IN_PLACE = frozenset(("SliceUpdate", "Scatter", "ScatterAxis"))
"""Primitives that write into their first input, if nothing else refers to it, as in mlx-lm's KV caches."""


LOOK_UPS = frozenset(("Gather", "GatherAxis"))
OF_EXPERTS = frozenset(("GatherMM", "GatherQMM"))
"""Primitives that read some rows, or some matrices, of a large input."""

MAX_WIDTH = 20
"""Of the breadth-first order (mlx/utils.h, `bfs_max_width`)."""


def operations(records: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """The operations of a graph in MLX's order, from the records that `mx.export_function` gives its callback: a
    primitive's name, and (name, shape, dtype) of each of its inputs and outputs. Views are left out."""
    buffers: dict[str, str] = {}
    elements: dict[str, int] = {}
    primitives, results = [], []
    for record in records:
        if record["type"] == "outputs":
            results += [name for name, _, _ in record["outputs"]]
        if record["type"] != "primitive":
            continue
        primitives.append(record)
        name, inputs, outputs = str(record["name"]), record["inputs"], record["outputs"]
        for array, shape, _ in (*inputs, *outputs):
            elements.setdefault(array, math.prod(shape))
            buffers.setdefault(array, array)
        if name in VIEWS or name in IN_PLACE:
            for array, _, _ in outputs:
                buffers[array] = buffers[inputs[0][0]]
                if name not in SMALLER_VIEWS:
                    elements[array] = elements[inputs[0][0]]
    found: list[Operation] = []
    for record in evaluation_order(primitives, results):
        name, inputs, outputs = str(record["name"]), record["inputs"], record["outputs"]
        if name not in VIEWS:
            bound: dict[str, int] = {}
            for array, _, _ in (*inputs, *outputs):
                bound.setdefault(buffers[array], elements[array])
            # A concatenation copies its inputs one by one (mlx/backend/gpu/copy.cpp).
            dispatches = len(inputs) if name == "Concatenate" else 1
            written = {buffers[array] for array, _, _ in outputs}
            read, wrote = ([elements[array] * dtype.size for array, _, dtype in each] for each in (inputs, outputs))
            num_bytes = bytes_read(name, read, wrote, [shape for _, shape, _ in inputs])
            sizes = {buffers[array]: size for (array, _, _), size in zip(outputs, wrote, strict=True)}
            made = {} if name in IN_PLACE else sizes
            found.append(Operation(name, dispatches, bound, written, num_bytes, made, (), name in DONATING))
    seen = {buffers[array] for array in results if array in buffers}
    for i, operation in reversed([*enumerate(found)]):
        found[i] = replace(operation, last_read=operation.bound.keys() - seen - set(operation.made))
        seen |= operation.bound.keys()
    return found


def evaluation_order(primitives: Sequence[Mapping[str, Any]], results: Sequence[str]) -> list[Mapping[str, Any]]:
    """The primitives in the order in which MLX evaluates them: breadth first from the results, and the last first. An
    array comes up when all that read it have come up (mlx/transforms.cpp, `eval_impl`)."""
    maker = {array: i for i, each in enumerate(primitives) for array, _, _ in each["outputs"]}
    sources = [[maker[array] for array, _, _ in each["inputs"] if array in maker] for each in primitives]
    ends = [maker[array] for array in results if array in maker]
    readers = Counter(itertools.chain(ends, *sources))
    tape: list[list[int]] = [ends]  # the sources of each primitive that has come up
    order: list[int] = []
    deferred: list[tuple[list[int], int]] = []
    at = 0
    while at < len(tape) or deferred:
        inputs, first = (tape[at], 0) if at < len(tape) else deferred.pop()
        at += at < len(tape)
        for j in range(first, len(inputs)):
            if len(tape) - at >= MAX_WIDTH:
                deferred.append((inputs, j))
                break
            readers[inputs[j]] -= 1
            if not readers[inputs[j]]:
                tape.append(sources[inputs[j]])
                order.append(inputs[j])
    return [primitives[i] for i in reversed(order)]


def bytes_read(name: str, inputs: Sequence[int], outputs: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> int:
    """What one primitive reads. inputs, outputs: bytes of each. shapes: of the inputs.

    Experts are read once each: their number is the expected one, if all tokens choose at random. A kernel's bytes are
    those of the arrays that it gets. So KV pools are missing, of which it gets a few elements."""
    if name in IN_PLACE:
        return sum(inputs[1:])
    if name in LOOK_UPS:
        return sum(outputs) + sum(inputs[1:])
    if name in OF_EXPERTS:
        num_experts = shapes[1][0]
        unread: float = (1 - 1 / num_experts) ** math.prod(shapes[-1])
        matrices = sum(size for size, shape in zip(inputs, shapes, strict=True) if shape[0] == num_experts)
        return sum(inputs) - round(matrices * unread)
    return sum(inputs)


class Counts(NamedTuple):
    """Of one step that ends with an evaluation."""

    dispatches: int
    barriers: int
    commits: int


def count_commits(step: Sequence[Operation], limits: CommitLimits) -> int:
    """Command buffers of one step."""
    return count(step, limits).commits


def split(step: Sequence[Operation], limits: CommitLimits) -> Iterator[list[Operation]]:
    """The operations of each command buffer."""
    ops, total, bound = 0, 0, set[str]()
    found: list[Operation] = []
    for operation in step:
        found.append(operation)
        ops += operation.dispatches
        total += sum(size for buffer, size in operation.bound.items() if buffer not in bound)
        bound |= operation.bound.keys()
        if ops > limits.ops or total // MIB > limits.mib:
            yield found
            ops, total, bound, found = 0, 0, set(), []
    yield found


def count(step: Sequence[Operation], limits: CommitLimits) -> Counts:
    commits, barriers = 0, 0
    for operations_of_one in split(step, limits):
        commits += 1
        read, written = set[str](), set[str]()  # since the last barrier
        for operation in operations_of_one:
            if not written.isdisjoint(operation.bound) or not read.isdisjoint(operation.written):
                barriers += 1
                read.clear()
                written.clear()
            read |= operation.bound.keys()
            written |= set(operation.written)
    return Counts(sum(operation.dispatches for operation in step), barriers, commits)


def peak_bytes(step: Sequence[Operation], limits: CommitLimits) -> int:
    """Most bytes of results that exist at once, if the GPU is so slow that the host always waits for it."""
    live, held, unread = dict[str, int](), Counter[str](), set[str]()
    in_flight = deque[set[str]]()
    peak = 0
    for operations_of_one in split(step, limits):
        reading: set[str] = set()
        for operation in operations_of_one:
            free = [buffer for buffer in operation.last_read if buffer in live and not held[buffer]]
            for buffer, size in operation.made.items():
                donor = next((each for each in free if live[each] == size), None) if operation.donates else None
                if donor is not None:
                    free.remove(donor)
                    del live[donor]
                live[buffer] = size
            peak = max(peak, sum(live.values()))
            held.update(operation.bound.keys() - operation.made.keys() - reading)
            reading |= operation.bound.keys() - operation.made.keys()
            unread |= set(operation.last_read)
        in_flight.append(reading)
        if len(in_flight) > IN_FLIGHT:
            for buffer in in_flight.popleft():
                held[buffer] -= 1
                if buffer in unread and not held[buffer]:
                    live.pop(buffer, None)
    return peak


def command_buffers(served: ServedModel, block_size: int) -> int:
    """Of a step in which one sequence decodes its first token. The step is not computed."""
    caches = ModelCaches(served.layers, 2, block_size, "metal")
    meta = AttentionMetadata.build([1], [1], [[0]], block_size)
    mx.eval(caches.arrays, meta.positions, meta.slot_mapping, meta.block_tables)
    records: list[dict[str, Any]] = []

    def step(tokens: mx.array) -> mx.array:
        row = Row(sequence_id=0, start=0, token_ids=[0])
        return mx.argmax(caches.run(served.model, tokens, [meta], [row], {0}), axis=-1)

    mx.export_function(records.append, step, mx.zeros((1,), mx.int32))
    return count_commits(operations(records), limits_here())


def limits_here() -> CommitLimits:
    """Of this chip, unless MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER say otherwise."""
    chip = commit_limits(str(mx.device_info().get("architecture", "")))
    ops, mib = (os.environ.get(f"MLX_MAX_{name}_PER_BUFFER") for name in ("OPS", "MB"))
    return CommitLimits(int(ops or chip.ops), int(mib or chip.mib))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="default %(default)s")
    served = load_model(parser.parse_args().model)
    if not mx.metal.is_available():
        parser.error("there is no Metal device")
    print(f"command buffers of a decoding step: {command_buffers(served, 32)}")


if __name__ == "__main__":
    main()
