"""Split layers compute what they computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.cpu import small_products, split_linear, streams
from mlxpaged.cpu.small_products import WeightFirstHead, WeightFirstLinear
from mlxpaged.cpu.split_linear import SplitFeedForward, SplitHead, SplitLinear, split_linear_layers

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU's model is left alone")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers can be split."""
    monkeypatch.setattr(split_linear, "TILE", 16)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = list(layers)


class Network(nn.Module):
    def __init__(self, hidden: int = 96, bias: bool = False, activation: Callable[..., mx.array] = nn.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, hidden, bias), nn.Linear(32, hidden, bias)
        self.down_proj = nn.Linear(hidden, 32, bias)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def nbytes(module: nn.Module) -> int:
    parameters: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in parameters)


def close(got: mx.array, expected: mx.array) -> bool:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    return bool(mx.allclose(got, expected, rtol=1e-5, atol=1e-5 if got.dtype == mx.float32 else 1e-2))


def typed(layer: nn.Module, dtype: mx.Dtype) -> nn.Module:
    layer.set_dtype(dtype)
    return layer


LINEAR: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: nn.Linear(64, 72, bias=False),
    "float32, biased": lambda: nn.Linear(64, 72),
    "float16": lambda: typed(nn.Linear(64, 72), mx.float16),
    "bfloat16": lambda: typed(nn.Linear(64, 72, bias=False), mx.bfloat16),
    "4-bit": lambda: nn.QuantizedLinear(64, 72, bias=False, group_size=32, bits=4),
    "8-bit, biased": lambda: nn.QuantizedLinear(64, 72, group_size=64, bits=8),
    "mxfp4": lambda: nn.QuantizedLinear(64, 72, bias=False, group_size=32, bits=4, mode="mxfp4"),
}


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 1, 64), (2, 9, 64), (3, 5, 3, 64), (0, 1, 64)], ids=str)
def test_a_linear_layer(name: str, shape: tuple[int, ...]) -> None:
    layer = LINEAR[name]()
    x = mx.random.normal(shape).astype(layer.weight.dtype if type(layer) is nn.Linear else mx.float32)
    expected, weight, size = layer(x), mx.array(layer.weight), nbytes(layer)
    own = type(layer)
    split_linear_layers(Model(layer))
    assert isinstance(layer, SplitLinear)
    assert isinstance(layer, own)
    assert [part.weight.shape[0] for part in layer.parts] == [16, 32, 24]
    assert close(layer(x), expected)
    assert mx.array_equal(layer.weight, weight)
    assert nbytes(layer) == size  # no weight is kept twice


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: SwitchLinear(64, 48, 4, bias=False),
    "float32, biased": lambda: SwitchLinear(64, 48, 4),
    "4-bit": lambda: QuantizedSwitchLinear(64, 48, 4, bias=False, group_size=32, bits=4),
    "8-bit, biased": lambda: QuantizedSwitchLinear(64, 48, 4, group_size=64, bits=8),
}


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("name", EXPERTS)
def test_a_layer_of_experts(name: str) -> None:
    layer: Any = EXPERTS[name]()
    if "bias" in layer:
        layer.bias = mx.random.normal(layer.bias.shape)
    x, experts = mx.random.normal((6, 1, 1, 64)), mx.array([[0, 3], [1, 1], [2, 0], [3, 3], [0, 1], [2, 3]])
    expected, weight, size = layer(x, experts), mx.array(layer.weight), nbytes(layer)
    inputs = layer.input_dims
    split_linear_layers(Model(layer))
    assert isinstance(layer, SplitLinear)
    assert len(layer.parts) == 3
    assert close(layer(x, experts), expected)
    assert close(layer(x, experts, sorted_indices=False), expected)
    assert mx.array_equal(layer.weight, weight)
    assert (layer.input_dims, layer.output_dims, nbytes(layer)) == (inputs, 48, size)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "float32": lambda: nn.Embedding(100, 64),
    "float16": lambda: typed(nn.Embedding(100, 64), mx.float16),
    "4-bit": lambda: nn.QuantizedEmbedding(100, 64, group_size=32, bits=4),
}


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("name", HEADS)
def test_an_embedding_that_is_the_head(name: str) -> None:
    layer = HEADS[name]()
    tokens = mx.array([[3], [99], [0]])
    vectors = layer(tokens)
    expected, size = layer.as_linear(vectors), nbytes(layer)
    split_linear_layers(Model(layer))
    assert isinstance(layer, SplitHead)
    assert mx.array_equal(layer(tokens), vectors)
    assert close(layer.as_linear(vectors), expected)
    assert nbytes(layer) == size


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("activation", [nn.silu, nn.gelu, nn.relu2])
@pytest.mark.parametrize("shape", [(1, 32), (5, 1, 32), (2, 9, 32)], ids=str)
def test_a_network_is_split_as_a_whole(activation: Callable[..., mx.array], shape: tuple[int, ...]) -> None:
    network = Network(activation=activation)
    x = mx.random.normal(shape)
    expected, size = network(x), nbytes(network)
    split_linear_layers(Model(network))
    assert isinstance(network, SplitFeedForward)
    assert isinstance(network, Network)
    assert [part.gate_proj.weight.shape for part in network.parts] == [(32, 32)] * 3
    assert not any(isinstance(module, SplitLinear) for module in network.modules())  # a part runs on one stream
    assert close(network(x), expected)
    assert nbytes(network) == size


def normed(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def zeroed(x: mx.array) -> mx.array:
    return 0 * x


def undefined(x: mx.array) -> mx.array:
    return x * mx.nan


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize(
    "network",
    [
        lambda: Network(activation=normed),
        lambda: Network(activation=zeroed),
        lambda: Network(activation=undefined),
        lambda: Network(bias=True),
        lambda: typed(Network(), mx.float16),
        lambda: typed(Network(), mx.bfloat16),
    ],
    ids=["no sum of its units", "nothing to tell by", "not a number", "biased", "float16", "bfloat16"],
)
def test_if_a_network_is_no_sum_its_layers_are_split(network: Callable[[], Network]) -> None:
    whole = network()
    x = mx.random.normal((4, 32)).astype(whole.down_proj.weight.dtype)
    expected = whole(x)
    split_linear_layers(Model(whole))
    assert type(whole) is Network
    assert all(isinstance(layer, SplitLinear) for layer in (whole.gate_proj, whole.up_proj, whole.down_proj))
    got = whole(x)
    assert mx.array_equal(mx.isnan(got), mx.isnan(expected))
    assert close(mx.nan_to_num(got), mx.nan_to_num(expected))


@pytest.mark.usefixtures("many_streams")
def test_of_networks_that_compute_alike_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its equals are split like it, or left alone like it."""
    tried: list[nn.Module] = []
    own = split_linear.add_up
    monkeypatch.setattr(split_linear, "add_up", lambda *args: tried.append(args[0]) or own(*args))
    networks = [
        Network(activation=activation, hidden=hidden)
        for activation, hidden in [(nn.silu, 96)] * 3 + [(normed, 96)] * 3 + [(nn.silu, 64)] * 2
    ]
    x = mx.random.normal((4, 32))
    expected = [network(x) for network in networks]
    split_linear_layers(Model(*networks))
    assert len(tried) == 3
    assert [isinstance(network, SplitFeedForward) for network in networks] == [True] * 3 + [False] * 3 + [True] * 2
    assert all(close(network(x), wanted) for network, wanted in zip(networks, expected, strict=True))


class TakesMore(Network):
    def __call__(self, x: mx.array, *scales: mx.array) -> mx.array:
        return super().__call__(x) * scales[0]


class ReturnsMore(Network):
    def __call__(self, x: mx.array) -> tuple[mx.array, int]:  # type: ignore[override]
        return super().__call__(x), 0


class HasMore(Network):
    def __init__(self) -> None:
        super().__init__()
        self.more = mx.ones(96)


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("kind", [TakesMore, ReturnsMore, HasMore])
def test_a_network_of_another_kind_is_left_alone(kind: type[Network]) -> None:
    network = kind()
    split_linear_layers(Model(network))
    assert type(network) is kind
    assert isinstance(network.down_proj, SplitLinear)


@pytest.mark.usefixtures("many_streams")
def test_a_network_takes_what_it_took_before() -> None:
    class Scaled(Network):
        def __call__(self, x: mx.array, scale: float = 1.0, *, shift: float = 0.0) -> mx.array:
            return super().__call__(x) * scale + shift

    network, x = Scaled(), mx.random.normal((4, 32))
    expected = network(x, 3.0)
    split_linear_layers(Model(network))
    assert isinstance(network, SplitFeedForward)
    assert close(network(x, 3.0), expected)


@pytest.mark.usefixtures("many_streams")
def test_weights_are_moved_one_layer_at_a_time() -> None:
    """And none stays where it was: half types and quantized weights are not moved at all."""
    layers = [Network(9600), *(typed(nn.Linear(960, 960), dtype) for dtype in (mx.float32, mx.float16)), Network(9600)]
    layers += [nn.QuantizedLinear(960, 9600, bits=8), nn.Embedding(9600, 96), SwitchLinear(96, 960, 10)]
    layers += [Network(9600), Network(9600)]
    model = Model(*layers)
    del layers
    mx.eval(model.parameters())
    size = nbytes(model)
    largest = max(nbytes(layer) for layer in model.layers)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    split_linear_layers(model)
    assert mx.get_peak_memory() - before < 1.1 * largest < size / 3
    assert abs(mx.get_active_memory() - before) < largest / 10


def test_small_layers_are_left_alone() -> None:
    linear, embedding, network = nn.Linear(64, 72), nn.Embedding(64, 64), Network()
    split_linear_layers(Model(linear, embedding, network))
    assert [type(module) for module in (linear, embedding, network)] == [WeightFirstLinear, WeightFirstHead, Network]
    assert type(network.gate_proj) is WeightFirstLinear


@pytest.mark.usefixtures("many_streams")
def test_a_layer_with_more_parameters_than_are_known_is_left_alone() -> None:
    layer = nn.Linear(64, 72)
    layer.more = mx.ones(72)
    x = mx.random.normal((3, 64))
    expected = layer(x)
    split_linear_layers(Model(layer))
    assert isinstance(layer, nn.Linear)
    assert not isinstance(layer, SplitLinear)
    assert close(layer(x), expected)


@pytest.mark.usefixtures("many_streams")
def test_parts_are_computed_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, network, embedding = nn.Linear(64, 48), Network(), nn.Embedding(96, 64)
    split_linear_layers(Model(layer, network, embedding))
    seen: list[Any] = []
    for kind, method in ((WeightFirstLinear, "__call__"), (Network, "__call__"), (WeightFirstHead, "as_linear")):
        original = getattr(kind, method)

        def spy(self: Any, x: mx.array, original: Callable[..., mx.array] = original) -> mx.array:
            seen.append(mx.default_stream(mx.Device(mx.cpu)))
            return original(self, x)

        monkeypatch.setattr(kind, method, spy)
    for call in (lambda: layer(mx.ones((1, 64))), lambda: embedding.as_linear(mx.ones((1, 64)))):
        seen.clear()
        mx.eval(call())
        assert len(seen) == 3
        assert all(seen.count(stream) == 1 for stream in seen)
    seen.clear()
    mx.eval(network(mx.ones((1, 32))))
    assert len(seen) == 3 * 4
    assert [seen.count(stream) for stream in seen] == [4] * 12  # each part and its layers on one


def test_a_large_layer_is_split_in_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_linear, "TILE", small_products.TILE)
    monkeypatch.setattr(streams, "cores", lambda: 2)
    layer = nn.Linear(512, 1000)
    x = mx.random.normal((3, 512))
    expected = layer(x)
    split_linear_layers(Model(layer))
    other, own = (part.weight.shape[0] for part in layer.parts)
    assert other % small_products.TILE == 0
    assert 400 < other < own < 600
    assert close(layer(x), expected)
