"""Counts the Metal command buffers that MLX makes of a step, by MLX's own rule. A boundary between two of them costs
about 20 us of GPU time (ml-explore/mlx#4521).

MLX commits a command buffer after the operation with which the buffer's dispatches, or the elements of the arrays bound
to it, pass a limit. A buffer of memory counts once for each command buffer, with the `data_size` of the array that
binds it first. At the end of `eval` or `async_eval` it commits once more. The sources are mlx/backend/metal/device.cpp
(`set_input_array`, `needs_commit`, `commit`, the constructor of `Device`) and mlx/backend/metal/eval.cpp of MLX 0.32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """One primitive of a step's graph. bound: the elements of each array that it binds, by the buffer of memory."""

    name: str
    dispatches: int
    bound: Mapping[str, int]


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


def operations(records: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """The operations of a graph, from the records that `mx.export_function` gives its callback: a primitive's name, and
    (name, shape, dtype) of each of its inputs and outputs. Views are left out.

    The order is that of the records. MLX's own differs, which moves boundaries but hardly changes their number.
    """
    buffers: dict[str, str] = {}
    elements: dict[str, int] = {}
    found: list[Operation] = []
    for record in records:
        if record["type"] != "primitive":
            continue
        name, inputs, outputs = str(record["name"]), record["inputs"], record["outputs"]
        for array, shape, _ in (*inputs, *outputs):
            elements.setdefault(array, math.prod(shape))
            buffers.setdefault(array, array)
        if name in VIEWS or name in IN_PLACE:
            for array, _, _ in outputs:
                buffers[array] = buffers[inputs[0][0]]
                if name not in SMALLER_VIEWS:
                    elements[array] = elements[inputs[0][0]]
        if name not in VIEWS:
            bound: dict[str, int] = {}
            for array, _, _ in (*inputs, *outputs):
                bound.setdefault(buffers[array], elements[array])
            # A concatenation copies its inputs one by one (mlx/backend/gpu/copy.cpp).
            found.append(Operation(name, len(inputs) if name == "Concatenate" else 1, bound))
    return found


def count_commits(step: Sequence[Operation], limits: CommitLimits) -> int:
    """Command buffers of one step that ends with an evaluation."""
    commits, ops, total = 1, 0, 0
    bound: set[str] = set()
    for operation in step:
        ops += operation.dispatches
        for buffer, size in operation.bound.items():
            if buffer not in bound:
                bound.add(buffer)
                total += size
        if ops > limits.ops or total // MIB > limits.mib:
            commits, ops, total = commits + 1, 0, 0
            bound.clear()
    return commits
