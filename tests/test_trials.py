"""Of modules that compute alike, one is tried: what counts as alike, and what a start computes for equal layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxpaged.trials import Trials, record, record_all
from tests.attention.start_counts import Counted, count_start
from tests.support import demo_vocab_size, make_tiny_model, quantize


class Layer(nn.Module):
    def __init__(self, index: int = 0, size: int = 16, reads_index: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.index, self.reads_index, self.factor = index, reads_index, factor
        self.calls = 0

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        y = self.linear(x) * self.factor
        return y * y if self.reads_index and self.index > 1 else y


X = mx.zeros((2, 16))


def of(layer: Layer) -> Any:
    return record_all(layer, [[mx.zeros((2, layer.linear.weight.shape[1]))]])


def test_layers_with_other_weights_and_an_index_that_is_not_read_are_alike() -> None:
    assert of(Layer(index=1)) == of(Layer(index=2)) is not None


@pytest.mark.parametrize(
    "other",
    [
        Layer(index=2, reads_index=True),
        Layer(factor=2.0),
        Layer(size=32),
    ],
    ids=["an operation more", "another constant", "another size"],
)
def test_layers_that_compute_something_else_are_not(other: Layer) -> None:
    assert of(other) != of(Layer())


def test_types_and_quantization_make_layers_unlike() -> None:
    half, four, eight = Layer(), Layer(size=64), Layer(size=64)
    half.set_dtype(mx.float16)
    nn.quantize(four, group_size=32, bits=4)
    nn.quantize(eight, group_size=32, bits=8)
    recorded = [of(half), of(Layer()), *(record_all(layer, [[mx.zeros((2, 64))]]) for layer in (four, eight))]
    assert len(set(recorded)) == 4


def test_a_recorded_layer_is_as_it_was_and_nothing_is_computed() -> None:
    layer = Layer()
    weight = layer.linear.weight
    assert of(layer) is not None
    assert layer.linear.weight is weight
    assert layer.calls == 0


def test_a_layer_that_reads_results_is_tried_each_time() -> None:
    class Reading(Layer):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) if x.sum().item() == 0 else x

    layer = Reading()
    assert record(layer, layer, X) is None
    trials = Trials[bool]()
    trials.note(None, True)
    assert trials.known(None) is None
    assert trials.count == 1


def layers_that_make(kind: str, path: Path, count: int) -> dict[str, Counted]:
    """What a start computes for a model with so many equal layers."""
    if kind == "qwen3_moe":
        sizes: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        sizes |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 16}
        made = make_tiny_model(path, kind, num_hidden_layers=count, **sizes)
    else:
        made = make_tiny_model(path, kind, num_hidden_layers=count)
    return count_start(quantize(made, 4), max_num_seqs=2, max_num_batched_tokens=64)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_start_tries_no_more_for_more_equal_layers(kind: str, tmp_path: Path) -> None:
    """A join makes its layer by one evaluation. All else is what forward passes take."""
    few, many = (layers_that_make(kind, tmp_path / str(count), count) for count in (2, 8))
    vocab_size = demo_vocab_size()
    for phase in few:
        assert many[phase].passes(vocab_size) == few[phase].passes(vocab_size), phase
    for phase in ("joins", "fused attention"):
        assert many[phase].products == few[phase].products != [], phase
        assert many[phase].evaluations - few[phase].evaluations <= 6, phase  # one for each joined layer
    for phase in ("reference", "probe", "output head", "step memory"):
        assert many[phase].evaluations <= few[phase].evaluations, phase


def test_each_kind_of_layers_is_tried(tmp_path: Path) -> None:
    """Gemma 3 has layers with and without a window, whose ropes have other bases."""

    def products(pattern: int) -> int:
        window = {"sliding_window": 16, "sliding_window_pattern": pattern, "num_hidden_layers": 4}
        bases = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
        made = make_tiny_model(tmp_path / str(pattern), "gemma3_text", **window, **bases)
        return len(count_start(made, max_num_seqs=2, max_num_batched_tokens=64)["fused attention"].products)

    assert products(2) == 2 * products(1) > 0
