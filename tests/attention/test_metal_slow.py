"""The whole product of types, sizes, groups and extras, and contexts of 128k tokens: `make test-kernels`."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.attention.layout import KV_DTYPES
from mlxpaged.attention.variants import BLOCK_SIZES
from tests.attention.metal_cases import HEAD_DIMS, Case

pytestmark = pytest.mark.slow

DECODE = [(1, n) for n in (1, 31, 32, 33, 511, 512, 513, 4097)]
MIXED = [(1, 33), (33, 33), (5, 5), (20, 150), (1, 1), (32, 64), (2, 513)]
ALL_EXTRAS = {"window": 45, "softcap": 3.0, "has_sinks": True}
GROUPS = (1, 4, 8)


@pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("dtype", "head_dim"), [*itertools.product(KV_DTYPES, HEAD_DIMS)], ids=str)
def test_decode(
    unchecked: None, dtype: mx.Dtype, head_dim: int, block_size: int, group: int, extras: dict[str, Any]
) -> None:
    Case(DECODE, dtype, head_dim, block_size, kv_heads=1, group=group, **extras).check()


@pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("dtype", "head_dim"), [*itertools.product(KV_DTYPES, HEAD_DIMS)], ids=str)
def test_mixed_batch(
    metal: None, dtype: mx.Dtype, head_dim: int, block_size: int, group: int, extras: dict[str, Any]
) -> None:
    Case(MIXED, dtype, head_dim, block_size, kv_heads=1, group=group, chunk_partition=100, **extras).check()


@pytest.mark.parametrize("extras", [{}, ALL_EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("group", [16, 20, 128])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_latents(
    unchecked: None, dtype: mx.Dtype, group: int, lens: list[tuple[int, int]], extras: dict[str, Any]
) -> None:
    sizes = {"head_dim": 576, "value_size": 512, "latent": True, "kv_heads": 1}
    Case(lens, dtype, group=group, chunk_partition=100, **sizes, **extras).check()


@pytest.mark.parametrize("lens", [[(1, 131071), (1, 7)], [(3, 131072), (1, 40)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 4096])
def test_contexts_of_128k_tokens(unchecked: None, lens: list[tuple[int, int]], window: int | None) -> None:
    Case(lens, head_dim=32, kv_heads=1, group=2, window=window).check()
