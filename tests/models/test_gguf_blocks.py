"""Tensors of GGUF files keep their values in MLX's formats."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.models.sources.gguf.blocks import EXACT, Errors, Groups, arrays, bits_of, memory_bytes, quantized_again
from mlxpaged.models.sources.gguf.file import CODE_BOOKS, read_gguf
from tests.models.gguf_blocks import VALUES, random_tensor, values
from tests.models.gguf_files import TYPES, Stored, plain, write_gguf

SHAPE = (2, 3, 512)


def read(path: Path, stored: Stored, dtype: mx.Dtype = mx.float32) -> tuple[dict[str, mx.array], Errors, int]:
    """The arrays of a tensor, what quantizing it again has changed, and the bytes that were expected of it."""
    tensor = read_gguf(write_gguf(path / "model.gguf", {}, {"weight": stored})).tensors["weight"]
    errors = Errors()
    return arrays(tensor, dtype, errors), errors, memory_bytes(tensor)


def dequantized(found: dict[str, mx.array], kind: str) -> Any:
    mode = "mxfp4" if kind == "MXFP4" else "affine"
    wide = {
        name: array.astype(mx.float32) if name != "weight" and mode == "affine" else array
        for name, array in found.items()
    }
    result = mx.dequantize(wide["weight"], wide["scales"], wide.get("biases"), 32, bits_of(kind), mode)
    return np.array(result.astype(mx.float32))


@pytest.mark.parametrize("kind", [*EXACT, "MXFP4"])
def test_a_type_with_scales_for_32_numbers_keeps_its_values(kind: str, tmp_path: Path) -> None:
    stored = random_tensor(kind, SHAPE)
    found, errors, _ = read(tmp_path, stored)
    expected = values(stored)
    assert found["weight"].shape == (2, 3, 512 * (bits_of(kind) or 0) // 32)
    np.testing.assert_allclose(dequantized(found, kind), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert errors.relative() == {}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_scales_round_once(kind: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    stored = random_tensor(kind, SHAPE)
    exact, half = read(tmp_path, stored)[0], read(tmp_path, stored, dtype)[0]
    assert half["weight"].tolist() == exact["weight"].tolist()
    for name in ("scales", "biases"):
        assert half[name].dtype == dtype
        assert half[name].tolist() == exact[name].astype(dtype).tolist()


@pytest.mark.parametrize(
    ("kind", "limit"), [("Q6_K", 0.016), ("Q3_K", 0.06), ("Q2_K", 0.09), ("IQ4_NL", 0.03), ("IQ4_XS", 0.03)]
)
def test_other_types_are_quantized_again_and_the_error_is_measured(kind: str, limit: float, tmp_path: Path) -> None:
    stored = random_tensor(kind, SHAPE)
    found, errors, _ = read(tmp_path, stored)
    expected = values(stored)
    changed = dequantized(found, kind) - expected
    error = float(np.sqrt((changed**2).sum() / (expected**2).sum()))
    assert errors.relative() == {kind: pytest.approx(error, rel=1e-3)}
    assert 0 < error < limit


@pytest.mark.parametrize("kind", [*EXACT, "MXFP4", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS"])
def test_in_float32_every_type_has_its_own_values(kind: str, tmp_path: Path) -> None:
    """As a CPU computes them: nothing is quantized again, and no scale is rounded to 16 bits."""
    stored = random_tensor(kind, SHAPE)
    tensor = read_gguf(write_gguf(tmp_path / "model.gguf", {}, {"weight": stored})).tensors["weight"]
    errors = Errors()
    found = arrays(tensor, mx.bfloat16, errors, dense=True)
    assert set(found) == {"weight"}
    assert found["weight"].dtype == mx.float32
    expected = values(stored)
    np.testing.assert_allclose(np.array(found["weight"]), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert errors.relative() == {}


def values_of(groups: Groups) -> Any:
    q = np.array(groups.q)
    return q * np.repeat(np.array(groups.scales), 32, -1) + np.repeat(np.array(groups.biases), 32, -1)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_levels_of_equal_distance_stay_and_no_error_is_larger_than_with_all_levels(
    num_bits: int, dtype: mx.Dtype
) -> None:
    random = np.random.default_rng(num_bits)
    for num_levels in range(max(3, 2**num_bits - 7), 2**num_bits + 1):
        numbers = random.integers(0, num_levels, (4, 64))
        numbers[:, ::32], numbers[:, 1::32] = 0, num_levels - 1
        given = mx.array(2.0 * numbers - 6)
        np.testing.assert_allclose(values_of(quantized_again(given, num_bits, dtype)), given, atol=0.1)
    x = random.standard_normal((8, 64)).astype(np.float32)
    again = quantized_again(mx.array(x), num_bits, mx.float32)
    assert int(again.q.max()) < 2**num_bits
    groups = x.reshape(8, 2, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (high - low) / (2**num_bits - 1)
    plain = np.square(np.round((groups - low) / scale) * scale + low - groups).sum(-1)
    error = np.square(values_of(again).reshape(groups.shape) - groups).sum(-1)
    assert (error <= plain * (1 + 1e-5)).all()


def test_a_group_of_equal_numbers_keeps_them() -> None:
    again = quantized_again(mx.full((1, 32), 0.25), 3, mx.bfloat16)
    assert (values_of(again) == 0.25).all()


@pytest.fixture
def code_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the package `gguf`: a value is the first byte of its block, less the number of the type."""

    def dequantize(data: Any, kind: int) -> Any:
        assert data.dtype == np.uint8
        return np.repeat(data[..., :1].astype(np.float32) - kind, 256, axis=-1)

    package: Any = types.ModuleType("gguf")
    package.__spec__ = importlib.machinery.ModuleSpec("gguf", None)
    package.quants = types.SimpleNamespace(dequantize=dequantize)
    package.GGMLQuantizationType = {name: number for name, (number, _, _) in TYPES.items()}
    monkeypatch.setitem(sys.modules, "gguf", package)


@pytest.mark.usefixtures("code_books")
@pytest.mark.parametrize("kind", CODE_BOOKS)
def test_values_of_code_books_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    number, _, nbytes = TYPES[kind]
    stored = random_tensor(kind, SHAPE)
    found, errors, memory = read(tmp_path, stored, mx.bfloat16)
    expected = np.frombuffer(stored.data, np.uint8)[::nbytes].astype(np.float32) - number
    np.testing.assert_array_equal(dequantized(found, kind), np.repeat(expected, 256).reshape(SHAPE))
    assert errors.relative() == {kind: 0}
    assert sum(array.nbytes for array in found.values()) == memory
    assert bits_of(kind) == int(kind[2]) + 1


@pytest.mark.parametrize("kind", VALUES)
def test_the_memory_of_a_tensor_is_known_before_it_is_read(kind: str, tmp_path: Path) -> None:
    found, _, expected = read(tmp_path, random_tensor(kind, SHAPE), mx.bfloat16)
    assert sum(array.nbytes for array in found.values()) == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_numbers_that_are_not_quantized_stay_what_they_are(kind: str, tmp_path: Path) -> None:
    given = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    (weight,) = read(tmp_path, plain(given, kind))[0].values()
    dtype = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[kind]
    assert weight.dtype == dtype
    assert weight.tolist() == mx.array(given).astype(dtype).tolist()


def test_a_large_tensor_is_unpacked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_tensor("Q4_K", (7, 256))
    whole = read(tmp_path, stored)[0]
    monkeypatch.setattr("mlxpaged.models.sources.gguf.blocks.CHUNK_BYTES", 300)
    parts = read(tmp_path, stored)[0]
    assert {name: array.tolist() for name, array in parts.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
