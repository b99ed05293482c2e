"""Joined projections compute what they computed before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlxpaged.cpu.split_linear import SplitLinear, split_linear_layers
from mlxpaged.models.joins.joined_linear import JoinedLinear, join_projections

SIZES = (96, 32, 32)


class Attention(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (make(size) for size in SIZES)


def half(size: int) -> nn.Module:
    layer = nn.Linear(64, size)
    layer.set_dtype(mx.bfloat16)
    return layer


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "float32": lambda size: nn.Linear(64, size, bias=False),
    "biased": lambda size: nn.Linear(64, size),
    "bfloat16": half,
    "4-bit": lambda size: nn.QuantizedLinear(64, size, bias=False, group_size=32, bits=4),
    "8-bit, biased": lambda size: nn.QuantizedLinear(64, size, group_size=64, bits=8),
}


def layers_of(attention: Attention) -> list[nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))  # type: ignore[misc, union-attr, str-unpack]


@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (5, 1, 64), (2, 9, 64), (0, 1, 64)], ids=str)
def test_outputs_and_the_size_of_the_weights_stay(name: str, shape: tuple[int, ...], split: bool) -> None:
    attention = Attention(KINDS[name])
    x = mx.random.normal(shape).astype(mx.bfloat16 if name == "bfloat16" else mx.float32)
    before = [layer(x) for layer in layers_of(attention)]
    size = nbytes(attention)
    join_projections(attention)
    if split:
        split_linear_layers(attention)
        assert isinstance(attention.joint_proj, SplitLinear) == (mx.default_device() == mx.Device(mx.cpu))
    assert nbytes(attention) == size
    for layer, expected in zip(layers_of(attention), before, strict=True):
        assert isinstance(layer, JoinedLinear)
        got = layer(x)
        assert got.shape == expected.shape
        assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5 if got.dtype == mx.float32 else 1e-2)


def test_projections_may_be_called_in_any_order_with_any_array() -> None:
    attention = Attention(KINDS["biased"])
    x, y = mx.random.normal((3, 1, 64)), mx.random.normal((2, 1, 64))
    query, key, value = layers_of(attention)
    asked = [(value, x), (query, y), (query, y), (key, x), (query, x), (value, x), (value, y), (key, y), (query, y)]
    expected = [layer(array) for layer, array in asked]
    join_projections(attention)
    for (layer, array), outputs in zip(asked, expected, strict=True):
        assert mx.allclose(layer(array), outputs, rtol=1e-5, atol=1e-5)


def test_one_product_serves_all_three_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(KINDS["biased"])
    join_projections(attention)
    calls = []
    own = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: calls.append(self) or own(self, x))
    for _ in range(2):
        x = mx.random.normal((3, 1, 64))
        watched = weakref.ref(x)
        for layer in layers_of(attention):
            layer(x)
        del x
        gc.collect()
        assert watched() is None
    assert calls == [attention.joint_proj] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda size: nn.Linear(64, size, bias=size == 96),
        lambda size: nn.Linear(size, 64),
        lambda size: (half if size == 96 else KINDS["biased"])(size),
        lambda size: KINDS["4-bit" if size == 96 else "float32"](size),
        lambda size: nn.QuantizedLinear(64, size, bias=False, group_size=32, bits=4 if size == 96 else 8),
        lambda size: nn.QuantizedLinear(64, size, bias=False, group_size=32 if size == 96 else 64, bits=8),
        lambda size: type("Own", (nn.Linear,), {})(64, size),
        lambda size: nn.Identity(),
    ],
    ids=[
        "one biased",
        "other inputs",
        "other types",
        "one quantized",
        "other bits",
        "other groups",
        "own class",
        "none",
    ],
)
def test_unlike_layers_are_left_alone(make: Callable[[int], nn.Module]) -> None:
    attention = Attention(make)
    kinds = [type(layer) for layer in layers_of(attention)]
    join_projections(attention)
    assert [type(layer) for layer in layers_of(attention)] == kinds
    assert "joint_proj" not in attention


def test_a_module_without_all_three_is_left_alone() -> None:
    attention = Attention(KINDS["float32"])
    del attention["v_proj"]
    join_projections(attention)
    assert type(attention.q_proj) is nn.Linear
