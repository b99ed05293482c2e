"""The matrix kernel against float64: chunks of any length beside decoding sequences, what it reads and what it must
not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import kernels
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.attention.matrix import KEYS, MAX_SUMS, THREADGROUPS, THREADS, choose_variant, range_of_keys
from mlxpaged.attention.metal import BLOCK_SIZES
from mlxpaged.attention.tuning import MATRIX, Tuning
from tests.attention.metal_cases import HEAD_DIMS, Case
from tests.metal_on_cpu import Interpreter, is_supported

on_cpu = pytest.mark.skipif(not is_supported(), reason="needs the kernels to run on the CPU")

CHUNKS = [(16, 16), (1, 9), (40, 90), (2, 130)]
"""One starts a prompt, others continue one after a prefix hit; a sequence decodes."""


def by_matrices(partition: int | None = None) -> Tuning:
    return Tuning(chunks=replace(MATRIX, partition=partition))


IMAGES = {0: [(3, 16)], 2: [(40, 60), (60, 77)], 3: [(100, 130)]}
"""The first ends a chunk, the second and third meet within one, the last began before it."""

MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {"dtype": mx.bfloat16, "head_dim": 64, "group": 4},
    "heads of 80, in ranges of keys": {"dtype": mx.float16, "head_dim": 80, "group": 1, "tuning": by_matrices(48)},
    "all extras": {"head_dim": 40, "group": 3, "window": 30, "softcap": 3.0, "has_sinks": True, "block_size": 8},
    "gpt-oss": {"dtype": mx.bfloat16, "head_dim": 64, "group": 8, "window": 30, "has_sinks": True},
    "local chunks": {"head_dim": 32, "group": 1, "chunk": 30, "block_size": 16},
    "values of their own size": {"dtype": mx.float16, "head_dim": 36, "value_size": 20, "group": 7, "block_size": 16},
    "Gemma 3": {"head_dim": 32, "group": 3, "window": 60, "block_size": 16, "spans": IMAGES},
    "images in ranges of keys": {"head_dim": 20, "tuning": by_matrices(32), "has_sinks": True, "spans": IMAGES},
    "more heads than rows": {"head_dim": 44, "value_size": 36, "kv_heads": 1, "group": 33},
}
SAMPLE = [*list(MODELS)[:3], "Gemma 3"]


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_chunks_are_exact(metal: None, name: str) -> None:
    Case(CHUNKS, **{"tuning": by_matrices(), **MODELS[name]}).check()


def test_scores_in_the_hundreds(metal: None) -> None:
    case = Case(CHUNKS, tuning=by_matrices(), sharpness=300, **MODELS["all extras"] | {"softcap": 1e5})
    assert case.error() < 1e-3


def test_a_chunk_takes_the_matrix_kernel_and_a_decoding_sequence_does_not(metal_on_cpu: Interpreter) -> None:
    Case(CHUNKS, tuning=by_matrices(), **MODELS["Llama 3.2 1B"]).check()
    names = [launch.kernel for launch in metal_on_cpu.launches]
    assert names.count("matrix_attention") == names.count("paged_decode") == 1
    assert "merge_partials" not in names


@pytest.mark.parametrize(("name", "queries"), [("Llama 3.2 1B", 8), ("heads of 80, in ranges of keys", 32)])
def test_keys_and_values_are_read_once_per_query_tile(metal_on_cpu: Interpreter, name: str, queries: int) -> None:
    case = Case(CHUNKS, **{"tuning": by_matrices(), **MODELS[name]})
    case.check()
    [launch] = [launch for launch in metal_on_cpu.launches if launch.kernel == "matrix_attention"]
    chunks = [(query, context) for query, context in case.lens if query > 1]
    ends = [context - query + end for query, context in chunks for end in (*range(queries, query, queries), query)]
    expected = sum(ends) * case.kv_heads * case.head_dim
    assert launch.loads["keys"] == launch.loads["values"] == expected


def test_keys_before_the_window_are_not_read(metal_on_cpu: Interpreter) -> None:
    case = Case([(16, 120)], tuning=by_matrices(), **MODELS["all extras"])
    case.check()
    launch = metal_on_cpu.last_launch("matrix_attention")
    assert launch.loads["keys"] == (39 + 35) * case.kv_heads * case.head_dim, "tiles of ten and six tokens"


@on_cpu
def test_any_order_of_threads_gives_the_same() -> None:
    with Interpreter(seeds=range(3)).installed():
        Case(CHUNKS, tuning=by_matrices(), **MODELS["all extras"]).check()


def test_heads_too_large_for_matrices_take_the_paged_kernel(metal_on_cpu: Interpreter) -> None:
    assert choose_variant(KVLayout(1, 1280, 64, mx.float32, 32), 1) is None
    assert choose_variant(KVLayout(1, 24, 16, mx.float32, 32, latent=True), 1) is None, "it has a kernel of its own"
    Case([(2, 5)], head_dim=1280, value_size=64, kv_heads=1, group=1, tuning=by_matrices()).check()
    assert metal_on_cpu.launches[-1].kernel == "paged_attention"


SIZES = [*((size, size) for size in HEAD_DIMS), (192, 128), (96, 64), (36, 20), (64, 96), (576, 512), (320, 256)]


def test_every_variant_keeps_to_the_limits_of_a_threadgroup() -> None:
    for dtype, (key_size, size), group in itertools.product(KV_DTYPES, SIZES, range(1, 130)):
        variant = choose_variant(KVLayout(2, key_size, size, dtype, 32), group)
        assert variant is not None
        assert variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY
        assert variant.heads * variant.head_tiles >= group > variant.heads * (variant.head_tiles - 1)
        assert 1 <= variant.queries * variant.heads <= variant.rows
        assert variant.sums <= MAX_SUMS == 64, "in the registers of a thread"
        assert variant.rows % 8 == 0
        assert THREADS % variant.rows == 0, "as many threads for each row"
        assert THREADS // variant.rows <= 32, "of one simdgroup"
        if key_size <= 128 or (key_size <= 256 and dtype is not mx.float32):
            assert variant.rows == 32


def test_threadgroup_memory_is_what_was_calculated(metal_on_cpu: Interpreter) -> None:
    Case(CHUNKS, tuning=by_matrices(), **MODELS["all extras"]).check()
    variant = choose_variant(KVLayout(2, 40, 40, mx.float32, 8), 3)
    assert variant is not None
    assert variant.threadgroup_memory == metal_on_cpu.last_launch("matrix_attention").threadgroup_memory


@pytest.mark.parametrize(
    ("tiles", "keys", "size"),
    [(1, 20, 512), (16, 8192, 512), (64, 8192, 2048), (256, 8192, 8192), (16, 9000, 576), (2, 100_000, 800)],
)
def test_ranges_of_keys_fill_a_large_gpu_and_no_more(tiles: int, keys: int, size: int) -> None:
    assert range_of_keys(tiles, keys) == size
    assert size % KEYS == 0
    assert tiles * -(-keys // size) <= max(tiles, THREADGROUPS)


# The sweep


def sweep() -> list[Any]:
    """Every type and size; groups, block sizes, extras and ranges in turns."""
    extras: Sequence[dict[str, Any]] = (
        {},
        {"window": 45, "softcap": 3.0, "has_sinks": True},
        {"chunk": 30},
    )
    found = []
    sizes = (64, 80, 96, 128, 192, 256)
    groups = (1, 2, 3, 4, 5, 6, 7, 8, 71)
    for i, (dtype, size, extra) in enumerate(itertools.product(KV_DTYPES, sizes, extras)):
        group, block_size = groups[(4 * i + i // 9) % 9], BLOCK_SIZES[(i + i // 3) % 3]
        options = {"dtype": dtype, "head_dim": size, "group": group, "block_size": block_size, "seed": i}
        found.append(pytest.param(options | extra, (None, 32, 100)[i // 2 % 3], id=str(i)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("options", "partition"), sweep())
def test_chunks_of_every_type_size_and_group_are_exact(
    metal: None, options: dict[str, Any], partition: int | None
) -> None:
    case = Case([(16, 16), (33, 64), (2, 33), (20, 150)], kv_heads=1, tuning=by_matrices(partition), **options)
    case.check()
    assert np.isfinite(case.attend()).all()


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 255, 300])
@pytest.mark.parametrize("context", [0, 1, 31, 32, 33, 700])
def test_chunks_of_any_length_over_any_context_are_exact(unchecked: None, length: int, context: int) -> None:
    Case([(length, length + context)], tuning=by_matrices(), kv_heads=1, **MODELS["all extras"]).check()


@pytest.mark.slow
def test_a_chunk_over_32k_tokens_is_exact(unchecked: None) -> None:
    Case([(20, 32768), (3, 40)], head_dim=32, kv_heads=1, tuning=by_matrices()).check()
