"""Layers compute what they computed before, in the order that OpenBLAS is fastest in."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxpaged.cpu import blas, small_products
from mlxpaged.cpu.small_products import (
    LEAST_PACKED,
    MAX_ROWS,
    TILE,
    WeightFirstHead,
    WeightFirstLinear,
    store_for_products,
)
from mlxpaged.cpu.split_linear import SplitFeedForward, SplitHead, SplitLinear, split_linear_layers
from mlxpaged.models.joins.joined_linear import make_joint

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU's model is left alone")


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)


@pytest.fixture(autouse=True)
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS's routines are for AVX-512, whatever this machine has. A product of 7 rows and a tile is small."""
    monkeypatch.setattr(blas, "small_products", True)
    monkeypatch.setattr(small_products, "MAX_MULTIPLY_ADDS", 64 * TILE * 7)


def close(got: mx.array, expected: mx.array) -> bool:
    assert got.shape == expected.shape
    return bool(mx.allclose(got, expected, rtol=1e-5, atol=1e-4))


@pytest.mark.parametrize("outputs", [1, TILE, TILE + 1, 8 * TILE, 8 * TILE + 5])
@pytest.mark.parametrize(
    "shape",
    [(64,), (1, 64), (2, 3, 64), (7, 64), (8, 64), (15, 64), (16, 1, 64), (MAX_ROWS, 64), (MAX_ROWS + 1, 64), (0, 64)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_a_layer_computes_what_it_did(shape: tuple[int, ...], outputs: int, bias: bool) -> None:
    layer = nn.Linear(64, outputs, bias=bias)
    x = mx.random.normal(shape)
    expected, weight = layer(x), layer.weight
    store_for_products(layer)
    assert type(layer) is WeightFirstLinear
    assert close(layer(x), expected)
    assert layer.weight is weight


@pytest.mark.parametrize("outputs", [8 * TILE, 8 * TILE + 5])
def test_a_head_computes_what_it_did(outputs: int) -> None:
    head = nn.Embedding(outputs, 64)
    x, tokens = mx.random.normal((2, 9, 64)), mx.array([[0, outputs - 1, TILE - 1], [TILE, 7, 7]])
    expected, embedded = head.as_linear(x), head(tokens)
    store_for_products(head)
    assert type(head) is WeightFirstHead
    assert mx.array_equal(head(tokens), embedded)
    assert close(head.as_linear(x), expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "product"),
    [
        (1, 7 * TILE, ((7 * TILE, 64), (64, 1))),  # small as a whole
        (1, 9 * TILE, ((1, 64), (9, 64, TILE))),
        (7, 9 * TILE, ((7, 64), (9, 64, TILE))),
        (7, 9 * TILE + 1, ((9 * TILE + 1, 64), (64, 7))),
        (8, 9 * TILE, ((9 * TILE, 64), (64, 8))),
        (MAX_ROWS, 9 * TILE, ((9 * TILE, 64), (64, MAX_ROWS))),
        (MAX_ROWS + 1, 9 * TILE, ((MAX_ROWS + 1, 64), (64, 9 * TILE))),
    ],
)
def test_a_few_rows_are_multiplied_by_tiles_more_by_the_whole_matrix(
    rows: int, outputs: int, product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(64, outputs, bias=False)
    store_for_products(layer)
    seen: list[Any] = []
    own = mx.array.__matmul__
    monkeypatch.setattr(mx.array, "__matmul__", lambda a, b: seen.append((a.shape, b.shape)) or own(a, b))
    layer(mx.zeros((rows, 64)))
    assert seen == [product]


def test_from_some_rows_on_tiles_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "MAX_MULTIPLY_ADDS", 10**6)
    assert small_products.is_in_tiles(LEAST_PACKED - 1, 2048, 64)
    assert not small_products.is_in_tiles(LEAST_PACKED, 2048, 64)
    monkeypatch.setattr(blas, "small_products", False)
    assert not small_products.is_in_tiles(LEAST_PACKED - 1, 2048, 64)


@pytest.mark.usefixtures("many_streams")
def test_layers_heads_and_networks_are_split() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024, bias=False)
            self.down_proj = nn.Linear(1024, 64, bias=False)

        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))

    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024), Network(), nn.Embedding(1003, 64)]
    inputs = [mx.random.normal(shape) for shape in ((1, 64), (7, 64), (8, 64), (2, 3, 64), (MAX_ROWS + 1, 64))]

    def outputs() -> list[mx.array]:
        return [(getattr(layer, "as_linear", None) or layer)(x) for layer in layers for x in inputs]

    expected, sizes = outputs(), [nbytes(layer) for layer in layers]
    split_linear_layers(Model(*layers))
    kinds = [SplitLinear, SplitLinear, SplitFeedForward, SplitHead]
    assert [isinstance(layer, kind) for layer, kind in zip(layers, kinds, strict=True)] == [True] * 4
    for part in (*layers[0].parts, *layers[1].parts, *(network.down_proj for network in layers[2].parts)):
        assert type(part) is WeightFirstLinear
    assert all(close(got, wanted) for got, wanted in zip(outputs(), expected, strict=True))
    assert [nbytes(layer) for layer in layers] == sizes


def test_on_one_core_too() -> None:
    layers: list[Any] = [nn.Linear(64, 1024, bias=False), nn.Embedding(1003, 64)]
    split_linear_layers(Model(*layers))
    assert [type(layer) for layer in layers] == [WeightFirstLinear, WeightFirstHead]


def test_an_embedding_beside_a_head_of_its_own_stays_as_it_is() -> None:
    embedding, head = nn.Embedding(1024, 64), nn.Linear(64, 1024, bias=False)
    split_linear_layers(Model(embedding, head))
    assert [type(embedding), type(head)] == [nn.Embedding, WeightFirstLinear]


def test_an_embedding_of_a_model_without_logits_stays_as_it_is() -> None:
    embedding = nn.Embedding(1024, 64)
    split_linear_layers(Model(embedding), has_head=False)
    assert type(embedding) is nn.Embedding


def test_such_layers_are_joined() -> None:
    layers = [nn.Linear(64, 2 * TILE), nn.Linear(64, 3 * TILE)]
    x = mx.random.normal((3, 64))
    expected = mx.concatenate([layer(x) for layer in layers], axis=-1)
    for layer in layers:
        store_for_products(layer)
    assert close(make_joint(layers)(x), expected)  # type: ignore[misc]


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
