"""Tensors of GGUF files keep their values in MLX's formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.models.sources.gguf.blocks import EXACT, Errors, arrays, bits_of, memory_bytes
from mlxpaged.models.sources.gguf.file import read_gguf
from tests.models.gguf_blocks import VALUES, random_tensor, values
from tests.models.gguf_files import Stored, plain, write_gguf

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
    ("kind", "limit"), [("Q6_K", 0.03), ("Q3_K", 0.1), ("Q2_K", 0.15), ("IQ4_NL", 0.05), ("IQ4_XS", 0.05)]
)
def test_other_types_are_quantized_again_and_the_error_is_measured(kind: str, limit: float, tmp_path: Path) -> None:
    stored = random_tensor(kind, SHAPE)
    found, errors, _ = read(tmp_path, stored)
    expected = values(stored)
    changed = dequantized(found, kind) - expected
    error = float(np.sqrt((changed**2).sum() / (expected**2).sum()))
    assert errors.relative() == {kind: pytest.approx(error, rel=1e-3)}
    assert 0 < error < limit


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
