"""A model that is optimised for the CPU computes the same numbers as before."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm.models.llama
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten

from mlxpaged.cpu import streams
from mlxpaged.cpu.optimize import optimize_for_cpu, swiglu_by_exp2, swiglu_of_mlx_lm
from mlxpaged.cpu.small_products import WeightFirstLinear
from mlxpaged.models.loader import load_model
from tests.support import make_tiny_model

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only a CPU's model is changed")
GATES = np.concatenate([np.linspace(-120, 120, 4001), [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, -1e4]]).astype(np.float32)


def tiny(width: int = 8) -> Module:
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "intermediate_size": width, "num_attention_heads": 1}
    args = mlx_lm.models.llama.ModelArgs("llama", **sizes, rms_norm_eps=1e-5, vocab_size=8)  # type: ignore[arg-type]
    return mlx_lm.models.llama.Model(args)


@pytest.fixture(autouse=True)
def unrouted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-lm has it, even if another model was loaded before."""
    monkeypatch.setattr(mlx_lm.models.llama, "swiglu", swiglu_of_mlx_lm)


@on_cpu
def test_a_loaded_model_uses_exp2(tmp_path: Path) -> None:
    load_model(str(make_tiny_model(tmp_path / "m", "llama")))
    assert mlx_lm.models.llama.swiglu is swiglu_by_exp2


def test_swiglu_is_exact_to_the_last_digits() -> None:
    x = np.linspace(0.5, 1, GATES.size, dtype=np.float32)
    gates = GATES.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = gates / (1 + np.exp(-gates)) * x
    got = np.array(swiglu_by_exp2(mx.array(GATES), mx.array(x)))
    near = np.abs(GATES) < 30
    np.testing.assert_allclose(got[near], expected[near], rtol=3e-6)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-11)  # far from 0 almost nothing is left of it


@on_cpu
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_splitting_changes_no_number(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    gate, x = mx.random.normal((rows, 1, 32)), mx.random.normal((rows, 1, 32))
    alone = swiglu_by_exp2(gate, x)
    monkeypatch.setattr(streams, "HANDOFF", 1e-12)
    monkeypatch.setattr(streams, "cores", lambda: 4)
    assert mx.array_equal(swiglu_by_exp2(gate, x), alone)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_left_to_the_model(dtype: mx.Dtype) -> None:
    gate, x = mx.linspace(-8, 8, 64).astype(dtype), mx.linspace(-1, 1, 64).astype(dtype)
    got = swiglu_by_exp2(gate, x)
    assert got.dtype == dtype
    assert mx.array_equal(got, swiglu_of_mlx_lm(gate, x))


def test_a_models_own_function_of_that_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In mlx-lm 0.31, gpt-oss has one that takes its arguments the other way round."""
    own = lambda x_linear, x_glu: x_linear * x_glu  # noqa: E731
    monkeypatch.setattr(mlx_lm.models.llama, "swiglu", own)
    optimize_for_cpu(tiny())
    assert mlx_lm.models.llama.swiglu is own


@on_cpu
def test_the_weights_stay_as_they_are() -> None:
    model, other = tiny(), tiny()
    other.update(model.parameters())
    before = dict(tree_flatten(model.parameters()))
    optimize_for_cpu(model)
    assert type(model.layers[0].mlp.down_proj) is WeightFirstLinear
    assert model.layers[0].mlp.down_proj.weight is before["model.layers.0.mlp.down_proj.weight"]
    assert model.model.embed_tokens.weight is before["model.embed_tokens.weight"]
    tokens = mx.array([[1, 2, 3]])
    assert mx.allclose(model(tokens), other(tokens), rtol=1e-5, atol=1e-6)


def test_a_gpu_keeps_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    model = tiny()
    optimize_for_cpu(model)
    assert mlx_lm.models.llama.swiglu is swiglu_of_mlx_lm
    assert type(model.layers[0].mlp.down_proj) is Linear
