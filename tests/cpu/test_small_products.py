"""Products in tiles are those of the whole matrix, and layers take them only if OpenBLAS gains by it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxpaged.cpu import blas, small_products
from mlxpaged.cpu.small_products import MAX_MULTIPLY_ADDS, TILE, HeadInTiles, LinearInTiles, product
from mlxpaged.cpu.split_linear import LinearByInput, SplitHead, SplitLinear, split_linear_layers

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU's model is left alone")


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS's routines are for AVX-512, and tiny layers are large."""
    monkeypatch.setattr(blas, "small_products", True)
    monkeypatch.setattr(small_products, "MAX_MULTIPLY_ADDS", 64 * TILE * 7)


def close(got: mx.array, expected: mx.array) -> bool:
    assert got.shape == expected.shape
    return bool(mx.allclose(got, expected, rtol=1e-5, atol=1e-4))


@pytest.mark.parametrize("outputs", [TILE - 1, TILE, TILE + 1, 8 * TILE, 8 * TILE + 5])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (4, 64), (2, 3, 64), (37, 64), (38, 64), (0, 64)], ids=str)
def test_a_product_in_tiles(shape: tuple[int, ...], outputs: int) -> None:
    x, weight = mx.random.normal(shape), mx.random.normal((outputs, 64))
    assert close(product(x, weight), x @ weight.T)


@pytest.mark.parametrize(("more", "in_tiles"), [(0, True), (1, False)])
def test_as_many_rows_as_are_not_packed(more: int, in_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row more is a product with the whole matrix. Neither copies the weights."""
    inputs, outputs = 2048, 40 * TILE + 3
    x, weight = mx.random.normal((MAX_MULTIPLY_ADDS // (TILE * inputs) + more, inputs)), mx.zeros((outputs, inputs))
    mx.eval(x, weight)
    shapes: list[tuple[int, ...]] = []
    own = mx.array.__matmul__
    monkeypatch.setattr(mx.array, "__matmul__", lambda a, b: shapes.append(b.shape) or own(a, b))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(product(x, weight))
    assert mx.get_peak_memory() - before < weight.nbytes / 10
    assert shapes == ([(40, inputs, TILE), (inputs, 3)] if in_tiles else [(inputs, outputs)])


@pytest.mark.usefixtures("large", "many_streams")
def test_large_layers_and_heads_take_tiles() -> None:
    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024), nn.Embedding(1003, 64)]
    x = mx.random.normal((3, 64))
    calls = [layers[0], layers[1], layers[2].as_linear]
    expected, sizes = [call(x) for call in calls], [nbytes(layer) for layer in layers]
    weights = [mx.array(layer.weight) for layer in layers]
    split_linear_layers(Model(*layers))
    assert [isinstance(layer, SplitHead if i == 2 else SplitLinear) for i, layer in enumerate(layers)] == [True] * 3
    for layer in layers[:2]:
        assert [type(part) for part in layer.parts] == [LinearInTiles] * len(layer.parts)
    for i, layer in enumerate(layers):
        call = layer.as_linear if i == 2 else layer
        assert close(call(x), expected[i])
        assert mx.array_equal(layer.weight, weights[i])
        assert nbytes(layer) == sizes[i]


@pytest.mark.usefixtures("large")
def test_on_one_core_too() -> None:
    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Embedding(1003, 64)]
    split_linear_layers(Model(*layers))
    assert [type(layer) for layer in layers] == [LinearInTiles, HeadInTiles]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("layer", [nn.Linear(64, 32, bias=False), nn.Linear(64, 32)], ids=["plain", "biased"])
def test_small_layers_are_stored_by_input(layer: nn.Linear) -> None:
    split_linear_layers(Model(layer))
    assert type(layer) is LinearByInput


def test_other_routines_get_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "MAX_MULTIPLY_ADDS", 1000)
    monkeypatch.setattr(blas, "small_products", False)
    layer = nn.Linear(64, 1024, bias=False)
    split_linear_layers(Model(layer))
    assert type(layer) is LinearByInput


def test_half_types_are_left_alone(large: None) -> None:
    layer = nn.Embedding(1003, 64)
    layer.set_dtype(mx.bfloat16)
    split_linear_layers(Model(layer))
    assert type(layer) is nn.Embedding


@pytest.mark.parametrize(
    ("routines", "small"),
    [("Cooperlake", True), ("SkylakeX, by the processor's flags; its own pick is Prescott", True), ("Haswell", False)],
)
def test_the_routines_tell_whether_small_products_are_fast(
    routines: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("loaded", "small_products", "hint", "_reserved"):
        monkeypatch.setattr(blas, name, getattr(blas, name))
    monkeypatch.setattr(blas, "load", lambda only_if_loaded: (routines, 0))
    monkeypatch.setattr(blas, "use_threads", lambda count: None)
    monkeypatch.setattr("sys.platform", "linux")
    blas.prepare()
    assert blas.small_products is small


def nbytes(module: nn.Module) -> int:
    parameters: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in parameters)
