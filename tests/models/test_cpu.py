"""What a model computes differently on a CPU: the same numbers as its own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.llama
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.switch_layers import SwitchLinear

from mlxpaged.attention import lanes
from mlxpaged.cpu import blas
from mlxpaged.models import load_model
from mlxpaged.models.cpu import (
    NormBySum,
    RowGroups,
    row_groups,
    shorten_norms,
    suit_cpu,
    swiglu_by_powers,
    swiglu_of_mlx_lm,
)
from mlxpaged.models.joined import JoinedLayer
from mlxpaged.models.rope_tables import TurnsByTables
from tests.support import make_tiny_model

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only a CPU's model is changed")
GATES = np.concatenate([np.linspace(-120, 120, 4001), [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, -1e4]]).astype(np.float32)


def tiny(width: int = 8) -> Module:
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "intermediate_size": width, "num_attention_heads": 1}
    args = mlx_lm.models.llama.ModelArgs("llama", **sizes, rms_norm_eps=1e-5, vocab_size=8)  # type: ignore[arg-type]
    return mlx_lm.models.llama.Model(args)


@pytest.fixture(autouse=True)
def unrouted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-lm has it, whatever model was loaded before."""
    monkeypatch.setattr(mlx_lm.models.llama, "swiglu", swiglu_of_mlx_lm)


@on_cpu
def test_a_loaded_model_takes_powers(tmp_path: Path) -> None:
    load_model(str(make_tiny_model(tmp_path / "m", "llama")))
    assert mlx_lm.models.llama.swiglu is swiglu_by_powers


def test_it_is_swiglu_to_the_last_digits() -> None:
    x = np.linspace(0.5, 1, GATES.size, dtype=np.float32)
    gates = GATES.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gates / (1 + np.exp(-gates)) * x
    got = np.array(swiglu_by_powers(mx.array(GATES), mx.array(x)))
    near = np.abs(GATES) < 30
    np.testing.assert_allclose(got[near], expected[near], rtol=3e-6)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-11)  # where a power rounds, nothing is left of it


@on_cpu
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_lanes_change_no_number(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    gate, x = mx.random.normal((rows, 1, 32)), mx.random.normal((rows, 1, 32))
    alone = swiglu_by_powers(gate, x)
    monkeypatch.setattr(lanes, "HAND_OVER", 1e-12)
    monkeypatch.setattr(lanes, "cores", lambda: 4)
    assert mx.array_equal(swiglu_by_powers(gate, x), alone)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_left_to_the_model(dtype: mx.Dtype) -> None:
    gate, x = mx.linspace(-8, 8, 64).astype(dtype), mx.linspace(-1, 1, 64).astype(dtype)
    got = swiglu_by_powers(gate, x)
    assert got.dtype == dtype
    assert mx.array_equal(got, swiglu_of_mlx_lm(gate, x))


class Norms(Module):
    def __init__(self, *norms: Module) -> None:
        super().__init__()
        self.norms = list(norms)


def weighted(eps: float = 1e-5, dtype: mx.Dtype = mx.float32) -> nn.RMSNorm:
    norm = nn.RMSNorm(64, eps)
    norm.weight = mx.random.normal((64,)).astype(dtype)
    return norm


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6, 0.0])
@pytest.mark.parametrize(
    "shape", [(1, 1, 64), (7, 1, 64), (2, 9, 64), (5, 3, 1, 64), (0, 1, 64), (3, 64), (64,)], ids=str
)
def test_norms_are_what_they_were(shape: tuple[int, ...], scale: float) -> None:
    for eps in (1e-5, 1e-6, 0.1):
        norm, x = weighted(eps), scale * mx.random.normal(shape)
        expected = norm(x)
        shorten_norms(Norms(norm))
        assert isinstance(norm, NormBySum)
        got = norm(x)
        assert got.shape == expected.shape
        assert mx.allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_a_norm_follows_the_number_of_rows() -> None:
    """What it keeps of one step is not for another that has more rows, or fewer, or heads."""
    norm, own = weighted(), nn.RMSNorm(64)
    own.weight = norm.weight
    shorten_norms(Norms(norm))
    for shape in [(7, 1, 64), (7, 1, 64), (1, 1, 64), (4, 3, 1, 64), (9, 1, 64)]:
        x = mx.random.normal(shape)
        got = norm(x)
        assert got.shape == shape
        assert mx.allclose(got, own(x), rtol=1e-5, atol=1e-7)


def test_norms_keep_their_parameters_and_those_of_half_types_stay() -> None:
    norm, half = weighted(), weighted(dtype=mx.bfloat16)
    weight = mx.array(norm.weight)
    shorten_norms(Norms(norm, half))
    assert mx.array_equal(norm.weight, weight)
    assert norm.parameters().keys() == {"weight"}
    assert type(half) is nn.RMSNorm
    x = mx.random.normal((2, 1, 64)).astype(mx.float16)
    assert mx.array_equal(norm(x), mx.fast.rms_norm(x, weight, 1e-5))


def test_a_models_own_function_of_that_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mlx-lm 0.31, gpt-oss has one that takes its arguments the other way round."""
    own = lambda x_linear, x_glu: x_linear * x_glu  # noqa: E731
    monkeypatch.setattr(mlx_lm.models.llama, "swiglu", own)
    suit_cpu(tiny())
    assert mlx_lm.models.llama.swiglu is own


def strides(array: mx.array) -> tuple[int, ...]:
    return memoryview(array).strides  # type: ignore[arg-type]


@on_cpu
def test_linear_weights_are_stored_by_input() -> None:
    model, other = tiny(), tiny()
    other.update(model.parameters())
    suit_cpu(model)
    moved, kept = model.layers[0].mlp.down_proj.weight, other.layers[0].mlp.down_proj.weight
    assert moved.shape == kept.shape
    assert mx.array_equal(moved, kept)
    assert (strides(moved), strides(kept)) == ((4, 32), (32, 4))
    embedding = model.model.embed_tokens.weight  # tied to the head, and read row by row
    assert strides(embedding) == (32, 4)
    assert isinstance(model.layers[0].self_attn.rope, TurnsByTables)
    assert isinstance(model.layers[0].self_attn.q_proj, JoinedLayer)
    assert isinstance(model.layers[0].input_layernorm, NormBySum)
    tokens = mx.array([[1, 2, 3]])
    assert mx.allclose(model(tokens), other(tokens), rtol=1e-5, atol=1e-6)


def test_a_gpu_keeps_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    model = tiny()
    suit_cpu(model)
    assert mlx_lm.models.llama.swiglu is swiglu_of_mlx_lm
    assert strides(model.layers[0].mlp.down_proj.weight) == (32, 4)
    assert type(model.layers[0].mlp.down_proj) is Linear
    assert type(model.layers[0].self_attn.rope) is RoPE
    assert type(model.layers[0].self_attn.q_proj) is Linear
    assert type(model.layers[0].input_layernorm) is nn.RMSNorm


@on_cpu
def test_steps_are_filled_up_for_openblas_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, half, quantized = tiny(), tiny(), tiny(32)
    half.set_dtype(mx.float16)
    nn.quantize(quantized, group_size=32, bits=4, class_predicate=lambda _, module: isinstance(module, Linear))
    for each in (model, half, quantized):
        suit_cpu(each)
    monkeypatch.setattr(blas, "loaded", "OpenBLAS (Zen)")
    assert [row_groups(each) for each in (model, half, quantized)] == [RowGroups(4, least=1), RowGroups(), RowGroups()]
    monkeypatch.setattr(blas, "loaded", "OpenBLAS (SkylakeX)")
    assert row_groups(model) == RowGroups(4, least=3)
    monkeypatch.setattr(blas, "loaded", None)
    assert row_groups(model) == RowGroups()


@on_cpu
@pytest.mark.parametrize(("experts", "filled_up"), [(SwitchLinear(64, 64, 1), True), (SwitchLinear(64, 64, 8), False)])
def test_steps_are_not_filled_up_for_a_few_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, experts: Module, filled_up: bool
) -> None:
    """Experts compute row by row."""
    model = tiny(64)
    model.experts = experts
    suit_cpu(model)
    monkeypatch.setattr(blas, "loaded", "OpenBLAS (Zen)")
    assert row_groups(model) == (RowGroups(4, least=1) if filled_up else RowGroups())


@pytest.mark.parametrize(
    ("count", "missing"), [(0, 0), (1, 3), (2, 2), (3, 1), (4, 0), (5, 3), (6, 2), (7, 1), (8, 0), (141, 3)]
)
def test_rows_are_filled_up_to_whole_groups(count: int, missing: int) -> None:
    assert RowGroups(4).missing(count) == missing
    assert RowGroups(4, least=3).missing(count) == (missing if count > 2 else 0)
    assert RowGroups().missing(count) == 0
