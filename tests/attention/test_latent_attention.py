"""The kernel for latents against float64: decoding sequences, chunks, what it reads, and what it may use."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.attention import kernels
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.attention.variants import (
    LATENT_KEYS,
    LATENT_THREADS,
    MAX_REGISTERS,
    LatentVariant,
    choose_decode,
    choose_tile,
)
from tests.attention.metal_cases import Case
from tests.metal_on_cpu import Interpreter, is_supported

on_cpu = pytest.mark.skipif(not is_supported(), reason="needs the kernels to run on the CPU")

LENS = [(16, 16), (1, 9), (20, 90), (2, 130)]
"""One starts a prompt, others continue one after a prefix hit; a sequence decodes."""

DEEPSEEK = {"head_dim": 576, "value_size": 512}
SMALL = {"head_dim": 44, "value_size": 36}
"""Neither values nor k_pe fill their pairs of matrices, and most simdgroups have no columns."""

IMAGES = {0: [(3, 16)], 2: [(72, 80), (80, 87)], 3: [(100, 130)]}
"""The first ends a chunk, the second and third meet within one, the last began before it."""

MODELS: dict[str, dict[str, Any]] = {
    "GLM-4.7-Flash": DEEPSEEK | {"group": 20, "dtype": mx.bfloat16},
    "Kimi VL, float32": DEEPSEEK | {"group": 16, "block_size": 8},
    "MiniCPM3": {"head_dim": 288, "value_size": 256, "group": 40, "dtype": mx.float16},
    "all extras": SMALL | {"group": 3, "window": 30, "softcap": 3.0, "has_sinks": True, "block_size": 8},
    "local chunks": SMALL | {"group": 5, "chunk": 30, "block_size": 16},
    "images": SMALL | {"group": 3, "window": 60, "block_size": 16, "spans": IMAGES},
    "ranges that begin and end inside 16 keys": SMALL | {"group": 2, "chunk_partition": 24, "decode_partition": 24},
    "q_pe of four elements": {"head_dim": 24, "value_size": 20, "group": 30},
    "one head": SMALL | {"group": 1, "has_sinks": True},
}


def latent_case(lens: list[tuple[int, int]], **options: Any) -> Case:
    tiles = {"chunk_partition": 4096} | options
    return Case(lens, latent=True, kv_heads=1, **tiles)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_and_chunks_are_exact(metal_on_cpu: Interpreter, name: str) -> None:
    latent_case(LENS, **MODELS[name]).check()
    names = {launch.kernel for launch in metal_on_cpu.launches}
    assert names & {"latent_attention", "paged_attention", "paged_decode", "kv_gather"} == {"latent_attention"}


def test_scores_in_the_hundreds(metal: None) -> None:
    case = latent_case(LENS, sharpness=300, **MODELS["all extras"] | {"softcap": 1e5})
    assert case.error() < 1e-3


@on_cpu
def test_any_order_of_threads_gives_the_same() -> None:
    with Interpreter(seeds=range(3)).installed():
        latent_case(LENS, **MODELS["all extras"]).check()


@pytest.mark.parametrize(("group", "tiles"), [(16, 1), (20, 1), (24, 1), (64, 3), (128, 6)])
def test_a_tile_of_heads_reads_each_row_once_for_scores_and_values(
    metal_on_cpu: Interpreter, group: int, tiles: int
) -> None:
    latent_case([(1, 1), (1, 33), (1, 100)], group=group, dtype=mx.bfloat16, **DEEPSEEK).check()
    launch = metal_on_cpu.last_launch("latent_attention")
    assert launch.loads["rows"] == tiles * (1 + 33 + 100) * 576
    assert launch.grid[:2] == (384, tiles)


def test_keys_before_the_window_are_not_read(metal_on_cpu: Interpreter) -> None:
    latent_case([(16, 120)], **MODELS["all extras"]).check()
    launch = metal_on_cpu.last_launch("latent_attention")
    assert launch.loads["rows"] == (37 + 37) * 44, "two tiles of eight tokens"


SIZES = [(576, 512), (320, 256), (288, 256), (44, 36), (24, 20), (8, 4), (1280, 512), (1276, 4)]


@pytest.mark.parametrize("single_queries", [True, False])
def test_every_variant_keeps_to_the_limits_of_a_threadgroup(single_queries: bool) -> None:
    for dtype, (key_size, size), group in itertools.product(KV_DTYPES, SIZES, range(1, 130)):
        layout = KVLayout(1, key_size, size, dtype, 32, latent=True)
        variant = choose_tile(layout, group, single_queries=single_queries)
        assert isinstance(variant, LatentVariant)
        assert choose_decode(layout, group) == choose_tile(layout, group, single_queries=True)
        assert variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY
        assert variant.heads * variant.head_tiles >= group > variant.heads * (variant.head_tiles - 1)
        assert 1 <= variant.queries * variant.heads <= variant.rows
        assert variant.rows % 8 == 0
        assert variant.rows * LATENT_KEYS <= LATENT_THREADS == 384, "a thread for each score, with the most registers"
        assert variant.registers <= MAX_REGISTERS == 114, "of 128"
        if key_size <= 576:
            assert variant.head_tiles == -(-group // 24)


def test_threadgroup_memory_is_what_was_calculated(metal_on_cpu: Interpreter) -> None:
    latent_case(LENS, **MODELS["GLM-4.7-Flash"]).check()
    variant = choose_tile(KVLayout(1, 576, 512, mx.bfloat16, 32, latent=True), 20)
    assert variant.threadgroup_memory == metal_on_cpu.last_launch("latent_attention").threadgroup_memory


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 8, 16, 20, 33, 128])
def test_latents_of_every_type_and_group_are_exact(unchecked: None, dtype: mx.Dtype, group: int) -> None:
    latent_case([(16, 40), (5, 5), (1, 300)], group=group, dtype=dtype, **DEEPSEEK).check()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 31, 32, 33, 700])
def test_chunks_of_any_length_over_any_context_are_exact(unchecked: None, length: int, context: int) -> None:
    latent_case([(length, length + context)], **MODELS["all extras"]).check()
