"""The cache that a model sees in place of its own: which pool is read, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlxpaged.attention import layer
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layer import (
    PagedAttentionError,
    PagedLayer,
    StepContext,
    WindowMismatchError,
    route_attention,
)
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.core.step import Row


@pytest.fixture
def step() -> Iterator[StepContext]:
    """A step of one token at position 0."""
    context = StepContext()
    context.cut([Row(1, 0, [5], range(1), num_sampled=1)])
    context.begin([AttentionMetadata.build([1], [1], [[0]])])
    yield context
    context.end()


def layer_of(step: StepContext, window: int | None = None) -> PagedLayer:
    return PagedLayer(LayerKVCache(1, 1, 8, mx.float32, backend="gather"), step, window)


def token(value: float) -> mx.array:
    """[1, 1, 1, 8], as a model has it."""
    return mx.full((1, 1, 1, 8), value, mx.float32)


def test_a_layer_attends_to_its_own_pool(step: StepContext) -> None:
    one, other = layer_of(step), layer_of(step)
    one.update_and_fetch(token(1), token(3))
    other.update_and_fetch(token(1), token(7))
    assert one.attend(token(1), 1.0, None, None).tolist() == token(3).tolist()
    assert other.attend(token(1), 1.0, None, None).tolist() == token(7).tolist()
    assert step.attention_calls == 2
    assert one.offset.tolist() == [0]


def test_keys_lead_to_the_layer_that_has_written_them(step: StepContext) -> None:
    """A model may attend with the keys of an earlier layer."""
    one, other = layer_of(step), layer_of(step)
    keys, values = one.update_and_fetch(token(1), token(3))
    with pytest.raises(PagedAttentionError, match="before it has written any"):
        other.keys_and_values()
    assert step.layer_of(keys) is one
    assert step.layer_of(token(1)) is None
    assert one.keys_and_values() == (keys, values)


def test_the_function_of_a_model_is_replaced_once_and_other_keys_are_left_to_it(
    step: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(llama, "scaled_dot_product_attention", lambda *arrays, cache, **_: calls.append(cache))
    model = llama.Attention(llama.ModelArgs("llama", 8, 1, 8, 1, 1e-6, 16, num_key_value_heads=1))
    assert route_attention(model) == 1
    routed = llama.scaled_dot_product_attention
    assert route_attention(model) == 1
    assert llama.scaled_dot_product_attention is routed
    paged = layer_of(step)
    keys, values = paged.update_and_fetch(token(1), token(3))
    found = routed(token(1), keys, values, cache=None, scale=1.0, mask=None)
    assert found.tolist() == token(3).tolist()
    routed(token(1), token(1), token(2), cache="its own", scale=1.0, mask=None)
    assert calls == ["its own"]


def test_a_window_that_the_model_masks_must_be_that_of_the_layer(step: StepContext) -> None:
    assert layer_of(step, window=16).make_mask(1, window_size=16) is None  # type: ignore[func-returns-value]
    assert layer_of(step, window=16).make_mask(1) is None  # type: ignore[func-returns-value]
    with pytest.raises(WindowMismatchError, match="masks a window of 8 keys, and its cache keeps 16"):
        layer_of(step, window=16).make_mask(1, window_size=8)
    with pytest.raises(WindowMismatchError, match="masks a window of 8 keys, and its cache keeps all of them"):
        layer_of(step).make_mask(1, window_size=8)


def test_a_mask_of_the_models_own_is_refused(step: StepContext) -> None:
    with pytest.raises(PagedAttentionError, match="mask of its own"):
        layer_of(step).attend(token(1), 1.0, mx.zeros((1, 1)), None)


def test_a_call_outside_a_step_is_refused() -> None:
    context = StepContext()
    with pytest.raises(PagedAttentionError, match="outside a step"):
        layer_of(context).update_and_fetch(token(1), token(1))
    assert layer.running_step is None
