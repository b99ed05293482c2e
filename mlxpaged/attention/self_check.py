"""The self-check at start: compares the Metal kernels with the gather backend, before the first request.

Each case runs some of the kernels on random data on both backends, in the variants that the model's layers need. If a
kernel fails to compile or gives other numbers on a new chip or a new macOS, the server uses the gather backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import LayerKVCache, resolve_backend
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.tuning import CONTIGUOUS, DEFAULT_TUNING, Choice, Tuning

logger = logging.getLogger(__name__)

TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference of values of about 1: far above a chip's own rounding, far below a wrong key."""

SPLIT_CONTEXT = 1100  # more than two ranges of keys, so that partial results are merged
OVERLAPPED_STEPS = 4


@dataclass(frozen=True)
class KernelCheck:
    """One case and its outcome; `problem` is None if the backends agree."""

    shape: AttentionShape
    case: str
    problem: str | None


class CheckRun:
    """One backend's run of a case. The runs of both backends use the same random numbers."""

    def __init__(self, shape: AttentionShape, backend: str, tuning: Tuning) -> None:
        self._shape = shape
        self._key = mx.random.key(0)
        self._blocks = -(-SPLIT_CONTEXT // shape.layout.block_size) + 4
        self.kv = LayerKVCache.from_layout(2 * self._blocks, shape.layout, backend, tuning)
        # Two sequences whose blocks alternate, in reverse order.
        self._tables = [list(range(2 * self._blocks - 1 - first, -1, -2)) for first in (0, 1)]
        self._sinks = self._random(shape.num_query_heads) if shape.sinks else None

    def _random(self, *dims: int) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(dims, key=key).astype(self._shape.layout.dtype)

    def step(self, query_lens: list[int], context_lens: list[int]) -> mx.array:
        """Write random keys and values for the query tokens, and attend with random queries."""
        shape, layout, tokens = self._shape, self._shape.layout, sum(query_lens)
        meta = AttentionMetadata.build(query_lens, context_lens, self._tables[: len(query_lens)], layout.block_size)
        keys = self._random(tokens, layout.num_kv_heads, layout.key_size)
        values = None if layout.latent else self._random(tokens, layout.num_kv_heads, layout.value_size)
        self.kv.write(keys, values, meta)
        queries = self._random(tokens, shape.num_query_heads, layout.key_size)
        options: dict[str, Any] = {"window": shape.window, "chunk": shape.chunk, "sinks": self._sinks}
        return self.kv.attend(queries, meta, scale=layout.key_size**-0.5, **options)

    def overlapped_steps(self) -> list[mx.array]:
        """Run decoding steps that are all in flight before the first one is waited for. Each must see its own writes
        and those of earlier steps, and none of later steps."""
        results = [self.step([5, 1], [5, 1])]
        for done in range(1, OVERLAPPED_STEPS):
            results.append(self.step([1, 1], [5 + done, 1 + done]))
            mx.async_eval(results[-1])
        return results

    def mixed_chunks(self) -> list[mx.array]:
        return [self.step([40, 1], [40, 1]), self.step([1, 20], [41, 21])]

    def split_contexts(self) -> list[mx.array]:
        return [self.step([SPLIT_CONTEXT], [SPLIT_CONTEXT]), self.step([1], [SPLIT_CONTEXT + 1])]

    def whole_blocks(self) -> list[mx.array]:
        layout = self._shape.layout
        sizes = (layout.key_size, layout.stored_value_size)
        data = [self._random(2, layout.num_kv_heads, layout.block_size, size) for size in sizes]
        self.kv.write_blocks([0, 3], *data)
        self.kv.copy_blocks([(3, 1)])
        return [array for array in self.kv.read_blocks([1, 0]) if array.size]


IN_RANGES = Tuning(decode=Choice(8), chunks=Choice(8))  # fewer keys than a tile of any chunk sees

CASES: dict[str, tuple[Callable[[CheckRun], list[mx.array]], Tuning]] = {
    "kv_write, paged_attention and paged_decode, overlapped steps": (CheckRun.overlapped_steps, DEFAULT_TUNING),
    "paged_attention, mixed chunks": (CheckRun.mixed_chunks, DEFAULT_TUNING),
    "kv_gather, mixed chunks": (CheckRun.mixed_chunks, Tuning(decode=CONTIGUOUS, chunks=CONTIGUOUS)),
    "merge_partials, mixed chunks": (CheckRun.mixed_chunks, IN_RANGES),
    "merge_partials, long contexts": (CheckRun.split_contexts, DEFAULT_TUNING),
    "block_write, block_copy and block_read": (CheckRun.whole_blocks, DEFAULT_TUNING),
}
"""The cases with their tunings. Together they run every kernel variant that any tuning can choose."""


def self_check(shapes: Iterable[AttentionShape]) -> list[KernelCheck]:
    """Every case for every shape."""
    return [KernelCheck(shape, case, problem(shape, case)) for shape in dict.fromkeys(shapes) for case in CASES]


def problem(shape: AttentionShape, case: str) -> str | None:
    """What is wrong with a case on the Metal backend, in a sentence; None if it passes."""
    try:
        run, tuning = CASES[case]
        expected, got = (run(CheckRun(shape, backend, tuning)) for backend in ("gather", "metal"))
        difference = max(float(mx.abs(a - b).astype(mx.float32).max()) for a, b in zip(got, expected, strict=True))
    except Exception as error:  # a kernel that does not compile, or a size that the kernels do not support
        return f"{type(error).__name__}: {error}"
    if not difference <= TOLERANCE[shape.layout.dtype]:
        return f"the results differ from the gather backend's by {difference:.3g}"
    return None


def choose_backend(wanted: str, shapes: Iterable[AttentionShape]) -> str:
    """The backend to serve on: `wanted`, or for "auto" Metal if kernels run and pass the self-check."""
    if wanted != "auto":
        return wanted
    if not kernels.can_run():
        return resolve_backend("auto")
    failed = next((check for check in self_check(shapes) if check.problem is not None), None)
    if failed is None:
        return "metal"
    logger.warning(
        "the Metal kernels are not used, attention is correct but slower: %s (%s): %s",
        failed.case,
        failed.shape,
        failed.problem,
    )
    return "gather"
