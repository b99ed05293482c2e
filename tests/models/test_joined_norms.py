"""An addition and the norm after it are one kernel, in layers whose own code says that they may be."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxpaged.models.joins.joined_norms import Addition, JoinedLayer, JoinedNorm, forms_of, join_norms

SIZE = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(SIZE, SIZE)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.o_proj(x) * (1 if mask is None else mask)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(SIZE, SIZE)
        self.first, self.second = nn.RMSNorm(SIZE, 1e-5), nn.RMSNorm(SIZE, 1e-6)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        r = self.attn(self.first(x), mask, cache)
        h = x + r
        return h + self.mlp(self.second(h))  # type: ignore[no-any-return]


class ByKeyword(Plain):
    def __call__(self, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:  # type: ignore[override]
        h = self.attn(self.first(x), cache=cache, mask=mask) + x
        return self.mlp(self.second(h)) + h  # type: ignore[no-any-return]


class Chosen(Plain):
    """One of two kinds of attention, as in hybrid models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_attn = Attention()
        self.is_linear = True

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        attn = self.linear_attn if self.is_linear else self.attn
        h = x + attn(self.first(x), mask, cache)
        return h + self.mlp(self.second(h))  # type: ignore[no-any-return]


class Scaled(Plain):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + 0.5 * self.attn(self.first(x), mask, cache)
        return h + self.mlp(self.second(h))  # type: ignore[no-any-return]


class ScaledAtTheEnd(Plain):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) * 2


class Parallel(Plain):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return x + self.attn(self.first(x), mask, cache) + self.mlp(self.second(x))  # type: ignore[no-any-return]


class NormsAfter(Plain):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.first(self.attn(x, mask, cache))
        return h + self.second(self.mlp(h))  # type: ignore[no-any-return]


class OwnNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second = type("Own", (nn.RMSNorm,), {})(SIZE)


class LooksIntoTheCache(Plain):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) + (0 if cache is None else cache.offset)


class MaskMade(Plain):
    """Attention gets what the layer makes of its argument."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, None if mask is None else (mask,), cache)


class AnyArguments(Plain):
    def __call__(self, x: mx.array, *args: Any) -> mx.array:
        return super().__call__(x, *args)


JOINED = [Plain, ByKeyword, Chosen]
LEFT_ALONE = [
    Scaled,
    ScaledAtTheEnd,
    Parallel,
    NormsAfter,
    OwnNorm,
    LooksIntoTheCache,
    MaskMade,
    AnyArguments,
]


class Model(nn.Module):
    def __init__(self, kind: type[Plain], layers: int = 2) -> None:
        super().__init__()
        self.layers = [kind() for _ in range(layers)]
        self.norm = nn.RMSNorm(SIZE)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight = 1 + 0.1 * mx.random.normal((SIZE,))

    def __call__(self, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
        if x.dtype == mx.int64 or x.dtype == mx.int32:  # tokens
            x = mx.broadcast_to(x[..., None].astype(mx.float32), (*x.shape, SIZE))
        for layer in self.layers:
            x = layer(x, mask, None) if not isinstance(layer, ByKeyword) else layer(x, mask=mask)
        return self.norm(x)  # type: ignore[no-any-return]


def norms_called(model: Model, x: mx.array, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many norms MLX computes by themselves."""
    calls: list[object] = []
    own = nn.RMSNorm.__call__
    with monkeypatch.context() as patch:
        patch.setattr(nn.RMSNorm, "__call__", lambda self, x: calls.append(self) or own(self, x))
        model(x)
    return len(calls)


@pytest.mark.parametrize("kind", JOINED)
def test_all_norms_but_the_first_are_computed_with_an_addition(
    kind: type[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, mask = Model(kind), mx.random.normal((3, 1, SIZE)), mx.random.normal((SIZE,))
    expected = model(x), model(x, mask=mask)
    weights = [id(module) for module in model.modules()]
    assert join_norms(model) == (2, [])
    assert all(isinstance(layer, (JoinedLayer, kind)) for layer in model.layers)
    assert mx.array_equal(model(x), expected[0])
    assert mx.array_equal(model(x, mask=mask), expected[1]), "arguments reach the part that gets them"
    assert norms_called(model, x, monkeypatch) == 1
    assert [id(module) for module in model.modules()] == weights
    assert join_norms(model) == (0, [])


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_layers_that_compute_something_else_are_left_alone(kind: type[Plain]) -> None:
    model, x = Model(kind), mx.random.normal((3, 1, SIZE))
    expected = model(x)
    assert forms_of([model.layers[0]]) == [None]
    assert join_norms(model) == (0, [])
    assert not any(isinstance(module, (JoinedLayer, JoinedNorm)) for module in model.modules())
    assert mx.array_equal(model(x), expected)


def test_a_norm_of_other_rows_than_the_last_sum_is_computed() -> None:
    model, x = Model(Plain), mx.random.normal((3, 1, SIZE))
    join_norms(model)
    y = mx.random.normal((3, 1, SIZE))
    model.layers[0](x)  # its output is not asked for by the norm of the next layer
    norm = model.layers[1].first
    assert mx.array_equal(norm(y), mx.fast.rms_norm(y, norm.weight, norm.eps))


def test_a_sum_or_norm_with_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(Plain), mx.random.normal((3, 1, SIZE))
    expected = model(x)
    own = Addition.compute
    monkeypatch.setattr(Addition, "compute", lambda self, x, y: (own(self, x, y)[0], own(self, x, y)[1] * 1.01))
    assert join_norms(model) == (0, ["layers.1", "layers.0"])
    assert mx.array_equal(model(x), expected)
