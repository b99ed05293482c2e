"""Counts the Metal command buffers of a decoding step, from the graph that MLX has of it."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx

from mlxpaged.attention import AttentionMetadata
from mlxpaged.attention.command_buffers import CommitLimits, commit_limits, count_commits, operations
from mlxpaged.models import ServedModel
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.states import StateRow


def command_buffers(served: ServedModel, block_size: int) -> int:
    """Of a step in which one sequence decodes its first token, by MLX's rule. The step is not computed."""
    caches = ModelCaches(served.layers, 2, block_size, "metal")
    meta = AttentionMetadata.build([1], [1], [[0]], block_size)
    mx.eval(caches.arrays, meta.positions, meta.slot_mapping, meta.block_tables)
    records: list[dict[str, Any]] = []

    def step(tokens: mx.array) -> mx.array:
        row = StateRow(sequence_id=0, start=0, num_tokens=1)
        return mx.argmax(caches.run(served.model, tokens, [meta], [row], {0}), axis=-1)

    mx.export_function(records.append, step, mx.zeros((1,), mx.int32))
    return count_commits(operations(records), limits_here())


def limits_here() -> CommitLimits:
    """Of this chip, unless MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER say otherwise."""
    chip = commit_limits(str(mx.device_info().get("architecture", "")))
    ops, mib = (os.environ.get(f"MLX_MAX_{name}_PER_BUFFER") for name in ("OPS", "MB"))
    return CommitLimits(int(ops or chip.ops), int(mib or chip.mib))
