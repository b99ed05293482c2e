"""RMSNorm on the CPU: MLX's numbers, also after its weight was changed, and other types as before."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxpaged.cpu.norms import SumNorm, sum_in_norms

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has a kernel for it")


def made(eps: float = 1e-5) -> Any:
    norm = nn.RMSNorm(576, eps)
    norm.weight = mx.random.normal((576,), key=mx.random.key(1))
    sum_in_norms(norm)
    assert isinstance(norm, SumNorm)
    return norm


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-2])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
@pytest.mark.parametrize("shape", [(576,), (1, 576), (1, 16, 576), (0, 576)], ids=str)
def test_it_has_the_numbers_of_mlx(shape: tuple[int, ...], size: float, eps: float) -> None:
    norm, x = made(eps), size * mx.random.normal(shape, key=mx.random.key(2))
    expected = mx.fast.rms_norm(x, norm.weight, eps)
    assert norm(x).shape == x.shape
    assert mx.allclose(norm(x), expected, rtol=1e-5, atol=1e-6)


def test_a_changed_weight_counts() -> None:
    norm, x = made(), mx.random.normal((3, 576))
    norm(x)
    norm.weight = norm.weight * 2
    assert mx.allclose(norm(x), mx.fast.rms_norm(x, norm.weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_are_computed_by_mlx(dtype: mx.Dtype) -> None:
    norm, x = made(), mx.random.normal((3, 576)).astype(dtype)
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, norm.weight, 1e-5))
    norm.set_dtype(dtype)
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, norm.weight, 1e-5))


def test_only_weights_of_the_file_are_parameters() -> None:
    assert set(made().parameters()) == {"weight"}
