"""Layers in tiles compute what they computed before, and only layers that gain by it are stored so."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxpaged.cpu import blas, small_products
from mlxpaged.cpu.small_products import TILE, HeadInTiles, LinearInTiles, TransposedLinear, store_for_products
from mlxpaged.cpu.split_linear import SplitFeedForward, SplitHead, SplitLinear, split_linear_layers
from mlxpaged.models.joins.joined_linear import make_joint

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU's model is left alone")


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)


@pytest.fixture(autouse=True)
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS's routines are for AVX-512, whatever this machine has. A product of 7 rows and a tile is small, and tiny
    heads are large."""
    monkeypatch.setattr(blas, "small_products", True)
    monkeypatch.setattr(small_products, "MAX_MULTIPLY_ADDS", 64 * TILE * 7)


def close(got: mx.array, expected: mx.array) -> bool:
    assert got.shape == expected.shape
    return bool(mx.allclose(got, expected, rtol=1e-5, atol=1e-4))


@pytest.mark.parametrize("outputs", [1, TILE, TILE + 1, 8 * TILE, 8 * TILE + 5])
@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (2, 3, 64), (7, 64), (8, 64), (15, 64), (256, 64), (257, 64), (0, 64)], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_a_layer_in_tiles_computes_what_it_did(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    layer = nn.Linear(64, outputs, bias=bias)
    x = mx.random.normal(shape)
    expected, weight = layer(x), mx.array(layer.weight)
    store_for_products(layer)
    assert isinstance(layer, LinearInTiles if outputs > TILE + 1 else TransposedLinear)
    assert close(layer(x), expected)
    assert mx.array_equal(layer.weight, weight)


@pytest.mark.parametrize("outputs", [8 * TILE, 8 * TILE + 5])
def test_a_head_in_tiles_looks_up_the_same_rows(outputs: int) -> None:
    head = nn.Embedding(outputs, 64)
    weight, x = mx.array(head.weight), mx.random.normal((2, 9, 64))
    tokens = mx.array([[0, outputs - 1, TILE - 1], [TILE, 7, 7]])
    store_for_products(head)
    assert type(head) is HeadInTiles
    assert mx.array_equal(head(tokens), weight[tokens])
    assert mx.array_equal(head(mx.array(3)), weight[3])
    assert close(head.as_linear(x), x @ weight.T)
    assert mx.array_equal(head.weight, weight)


@pytest.mark.parametrize(
    ("rows", "products"),
    [
        (7, [((7, 64), (9, 64, TILE))]),
        (8, [((1, 2, 4, 64), (9, 1, 64, TILE))]),
        (16, [((1, 2, 6, 64), (9, 1, 64, TILE)), ((4, 64), (9, 64, TILE))]),
        (257, [((257, 64), (64, 9 * TILE))]),
    ],
)
def test_no_product_is_packed_up_to_many_rows(rows: int, products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More are multiplied with the whole matrix."""
    layer = nn.Linear(64, 9 * TILE, bias=False)
    store_for_products(layer)
    seen: list[Any] = []
    own = mx.array.__matmul__
    monkeypatch.setattr(mx.array, "__matmul__", lambda a, b: seen.append((a.shape, b.shape)) or own(a, b))
    layer(mx.zeros((rows, 64)))
    assert seen == products
    for found, tiles in seen if rows <= 256 else ():
        assert found[-2] * tiles[-1] * tiles[-2] <= small_products.MAX_MULTIPLY_ADDS


@pytest.mark.usefixtures("many_streams")
def test_layers_and_heads_are_split_and_in_tiles() -> None:
    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024), nn.Embedding(1003, 64)]
    x, tokens = mx.random.normal((3, 64)), mx.array([0, 500, 1002])
    calls = [layers[0], layers[1], layers[2].as_linear]
    expected, sizes = [call(x) for call in calls], [nbytes(layer) for layer in layers]
    weights = [mx.array(layer.weight) for layer in layers]
    split_linear_layers(Model(*layers))
    assert [isinstance(layer, SplitHead if i == 2 else SplitLinear) for i, layer in enumerate(layers)] == [True] * 3
    for layer in layers[:2]:
        assert [type(part) for part in layer.parts] == [LinearInTiles] * len(layer.parts)
    assert isinstance(layers[2], HeadInTiles)
    assert mx.array_equal(layers[2](tokens), weights[2][tokens])
    for i, layer in enumerate(layers):
        call = layer.as_linear if i == 2 else layer
        assert close(call(x), expected[i])
        assert mx.array_equal(layer.weight, weights[i])
        assert nbytes(layer) - sizes[i] < TILE * 64 * 4


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_the_parts_of_a_split_layer_are_put_together_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 1024, bias=bias)
    own = [mx.random.normal(shape) for shape in ((7, 64), (8, 64), (2, 3, 64))]
    expected = [layer(x) for x in own]
    split_linear_layers(Model(layer))
    calls: list[int] = []
    merged = small_products.merged
    monkeypatch.setattr(small_products, "merged", lambda outputs: calls.append(len(outputs)) or merged(outputs))
    assert all(close(layer(x), wanted) for x, wanted in zip(own, expected, strict=True))
    parts = len(layer.parts)  # type: ignore[attr-defined]
    assert calls.count(parts) == 2  # eight rows are packed, or multiplied in two products


@pytest.mark.usefixtures("many_streams")
def test_a_network_keeps_tiles_between_its_layers() -> None:
    """With many rows, or with inputs of three axes, it gets its hidden units side by side."""

    shapes: list[tuple[int, ...]] = []

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024, bias=False)
            self.down_proj = nn.Linear(1024, 64, bias=False)

        def __call__(self, x: mx.array, scale: float = 1.0) -> mx.array:
            hidden = nn.silu(self.gate_proj(x)) * self.up_proj(x) * scale
            shapes.append(hidden.shape)
            return self.down_proj(hidden)

    network: Any = Network()
    inputs = [mx.random.normal(shape) for shape in ((1, 64), (7, 64), (8, 64), (2, 3, 64))]
    expected, scaled = [network(x) for x in inputs], network(inputs[3], 2.0)
    split_linear_layers(Model(network))
    assert isinstance(network, SplitFeedForward)
    shapes.clear()
    assert all(close(network(x), wanted) for x, wanted in zip(inputs, expected, strict=True))
    assert close(network(inputs[3], 2.0), scaled)
    by_tile = [len(shape) == 3 and shape[-1] == TILE for shape in shapes]
    parts = len(network.parts)
    assert by_tile == [True] * 2 * parts + [False] * parts + [True] * parts + [False] * parts


def test_on_one_core_too() -> None:
    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Embedding(1003, 64)]
    split_linear_layers(Model(*layers))
    assert [type(layer) for layer in layers] == [LinearInTiles, HeadInTiles]


def test_an_embedding_beside_a_head_of_its_own_stays_as_it_is() -> None:
    embedding, head = nn.Embedding(1024, 64), nn.Linear(64, 1024, bias=False)
    split_linear_layers(Model(embedding, head))
    assert [type(embedding), type(head)] == [nn.Embedding, LinearInTiles]


def test_an_embedding_of_a_model_without_logits_stays_as_it_is() -> None:
    embedding = nn.Embedding(1024, 64)
    split_linear_layers(Model(embedding), has_head=False)
    assert type(embedding) is nn.Embedding


def test_layers_in_tiles_are_joined_unless_a_tile_is_padded() -> None:
    layers = [nn.Linear(64, 2 * TILE), nn.Linear(64, 3 * TILE)]
    padded = [nn.Linear(64, 8 * TILE + 1), nn.Linear(64, 8 * TILE + 1)]
    x = mx.random.normal((3, 64))
    expected = mx.concatenate([layer(x) for layer in layers], axis=-1)
    for layer in (*layers, *padded):
        store_for_products(layer)
    joint = make_joint(layers)
    assert close(joint(x), expected)
    assert make_joint(padded) is None


def test_a_weight_that_is_assigned_is_stored_in_tiles() -> None:
    layer: Any = nn.Linear(64, 2 * TILE, bias=False)
    store_for_products(layer)
    x, weight = mx.random.normal((3, 64)), mx.random.normal((2 * TILE, 64))
    layer.weight = weight
    assert close(layer(x), x @ weight.T)


def test_other_routines_get_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "small_products", False)
    layer: Any = nn.Linear(64, 1024, bias=False)
    embedding = nn.Embedding(1024, 48)
    split_linear_layers(Model(layer, embedding))
    assert type(layer) is TransposedLinear
    assert layer.columns.shape == (64, 1024)
    assert type(embedding) is nn.Embedding


def test_half_types_are_left_alone() -> None:
    layers = [nn.Embedding(1003, 64), nn.Linear(64, 64)]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    split_linear_layers(Model(*layers))
    assert [type(layer) for layer in layers] == [nn.Embedding, nn.Linear]


@pytest.mark.parametrize(
    ("routines", "small"),
    [("Cooperlake", True), ("SkylakeX, by the processor's flags; its own pick is Prescott", True), ("Haswell", False)],
)
def test_the_routines_tell_whether_small_products_are_fast(
    routines: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("loaded", "small_products", "hint"):
        monkeypatch.setattr(blas, name, getattr(blas, name))
    monkeypatch.setattr(blas, "load", lambda only_if_loaded: routines)
    monkeypatch.setattr(blas, "use_threads", lambda count: None)
    monkeypatch.setattr("sys.platform", "linux")
    blas.prepare()
    assert blas.small_products is small


def nbytes(module: nn.Module) -> int:
    parameters: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in parameters)
