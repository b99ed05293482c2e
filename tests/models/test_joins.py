"""Joined gate and up projections compute what they computed before, by one product, in the same memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_oss
from mlx_lm.models.activations import swiglu
from mlx_lm.models.switch_layers import SwitchGLU

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.engine.builder import load_core
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import replacements
from mlxpaged.models.joins import expert_rows, joins
from mlxpaged.models.joins.joined_linear import JoinedLinear, Joint
from mlxpaged.models.joins.joins import join, join_gate_and_up, name_rows
from mlxpaged.models.loader import LoadOptions, load_model
from tests.models.architectures import make_architecture
from tests.support import every, run_requests

INPUTS, HIDDEN = 64, 128
ACTIVATION: Any = vars(gpt_oss).get("SwigluOAI") or vars(gpt_oss)["SwiGLU"]  # of mlx-lm 0.32, and 0.31


class FeedForward(nn.Module):
    def __init__(self, bias: bool = False, inputs: int = INPUTS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(inputs, hidden, bias), nn.Linear(inputs, hidden, bias)
        self.down_proj = nn.Linear(hidden, inputs, bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two networks."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.networks = [make(), make()]


def quantized(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    network = make()
    nn.quantize(network, **options)
    return network


def half(make: Callable[[], nn.Module]) -> nn.Module:
    network = make()
    network.set_dtype(mx.bfloat16)
    return network


def experts(bias: bool = False, **options: Any) -> nn.Module:
    return SwitchGLU(INPUTS, HIDDEN, 4, bias=bias, **options)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "float32": FeedForward,
    "biased": lambda: FeedForward(bias=True),
    "bfloat16": lambda: half(FeedForward),
    "4-bit": lambda: quantized(FeedForward, group_size=32, bits=4),
    "8-bit, biased": lambda: quantized(lambda: FeedForward(bias=True), group_size=64, bits=8),
    "mxfp4": lambda: quantized(FeedForward, group_size=32, bits=4, mode="mxfp4"),
    "experts": experts,
    "biased experts": lambda: experts(bias=True, activation=ACTIVATION()),
    "4-bit experts": lambda: quantized(experts, group_size=32, bits=4),
    "mxfp4 experts, biased": lambda: quantized(lambda: experts(bias=True), group_size=32, bits=4, mode="mxfp4"),
}


def rows_for(network: nn.Module, rows: int) -> list[mx.array]:
    types = {array.dtype for _, array in tree_flatten(network.parameters())}  # type: ignore[misc, union-attr, str-unpack]
    x = mx.random.normal((rows, 1, INPUTS)).astype(mx.bfloat16 if mx.bfloat16 in types else mx.float32)
    return [x, mx.random.randint(0, 4, (rows, 1, 2))] if isinstance(network, SwitchGLU) else [x]


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))  # type: ignore[misc, union-attr, str-unpack]


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-5, atol=1e-5 if b.dtype == mx.float32 else 2e-2).item())


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_the_size_of_the_weights_stay(name: str) -> None:
    model = Model(KINDS[name])
    network: Any = model.networks[0]
    inputs = [rows_for(network, rows) for rows in (1, 3, 50)]
    expected = [network(*each) for each in inputs]
    gate, size = network.gate_proj.weight, nbytes(model)
    assert join_gate_and_up(model) == (2, [])
    assert isinstance(network.gate_proj, JoinedLinear)
    assert all(close(network(*each), wanted) for each, wanted in zip(inputs, expected, strict=True))
    assert nbytes(model) == size
    assert mx.array_equal(network.gate_proj.weight, gate), "for code that reads it"
    assert join_gate_and_up(model) == (0, []), "it is joined already"


@pytest.mark.parametrize("name", ["biased", "4-bit experts"])
def test_one_product_serves_both(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(KINDS[name])
    network: Any = model.networks[0]
    join_gate_and_up(model)
    own, calls = type(network.down_proj).__call__, []
    monkeypatch.setattr(
        type(network.down_proj), "__call__", lambda self, *a, **b: calls.append(self) or own(self, *a, **b)
    )
    for _ in range(2):
        network(*rows_for(network, 2))
    assert calls == [network.joint_gate_up_proj, network.down_proj] * 2


@pytest.mark.parametrize("name", [name for name in KINDS if "experts" in name])
def test_experts_that_are_told_their_rows_give_the_same_numbers(name: str) -> None:
    """Their rows are no operation of a step, up to the products that mlx-lm sorts."""
    model = Model(KINDS[name])
    network: Any = model.networks[0]
    inputs = [rows_for(network, rows) for rows in (1, 3, 31, 32, 50)]
    expected = [network(*each) for each in inputs]
    assert name_rows(model) == (6, [])
    assert all(mx.array_equal(network(*each), wanted) for each, wanted in zip(inputs, expected, strict=True))
    assert [primitives(network, each).count("Arange") for each in inputs[:3]] == [0, 0, 0]
    assert name_rows(model) == (0, []), "they are told already"


def primitives(network: Any, inputs: list[mx.array]) -> list[str]:
    """Of a traced call, from the second one on."""
    network(*inputs)
    found: list[str] = []
    mx.export_function(lambda record: found.append(record.get("name", "")), network, *inputs)
    return found


def test_experts_with_other_numbers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(experts)
    kinds = [type(each) for each in model.modules()]
    monkeypatch.setattr(expert_rows, "rows_of", lambda shape: mx.zeros(shape, mx.uint32))  # all read the first row
    assert name_rows(model) == (0, [f"networks.{i}.{name}_proj" for i in (1, 0) for name in ("down", "up", "gate")])
    assert [type(each) for each in model.modules()] == kinds


class TwoInputs(FeedForward):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x + 1)))  # type: ignore[no-any-return]


class OtherArguments(FeedForward):
    def __call__(self, x: mx.array, scale: mx.array) -> mx.array:  # type: ignore[override]
        return super().__call__(x) * scale


class OneAlone(FeedForward):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.gate_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [TwoInputs, OtherArguments, OneAlone])
def test_networks_that_are_not_served_by_one_product_are_left_as_they_were(kind: type[FeedForward]) -> None:
    model = Model(kind)
    before, names = dict(tree_flatten(model.parameters())), [type(each) for each in model.modules()]  # type: ignore[arg-type]
    assert join_gate_and_up(model) == (0, ["networks.1", "networks.0"])
    after: Any = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[name], array) for name, array in before.items())
    assert [type(each) for each in model.modules()] == names


def test_other_numbers_are_undone_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(FeedForward)
    network, x = model.networks[1], mx.random.normal((3, 1, INPUTS))
    expected = network(x)
    own = Joint.output
    monkeypatch.setattr(Joint, "output", lambda self, *inputs, **more: own(self, *inputs, **more) * 1.01)
    with caplog.at_level(logging.INFO, logger="mlxpaged.models.joins.joins"):
        join(model)
    assert mx.array_equal(network(x), expected)
    [message] = caplog.messages
    assert "gate and up projections are not joined" in message
    assert "2 modules, the first is networks.0" in message


class InParts(nn.Module):
    """As a layer that is split among CPU streams: it has no arrays of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(INPUTS, HIDDEN // 2, bias=False) for _ in range(2)]

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)


class Copying(FeedForward):
    """What MLX records does not show that the projections get two objects, each with the same array."""

    copies = False

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x.reshape(x.shape) if self.copies else x)
        return self.down_proj(swiglu(gate, self.up_proj(x)))  # type: ignore[no-any-return]


def tried(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.endswith("were tried")]


@pytest.mark.parametrize("name", ["float32", "4-bit", "experts", "mxfp4 experts, biased"])
def test_of_networks_that_compute_alike_one_is_tried(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = Model(KINDS[name])
    model.networks = [*model.networks, *(KINDS[name]() for _ in range(4)), KINDS["biased"]()]
    inputs = [rows_for(network, 5) for network in model.networks]
    expected = [network(*each) for network, each in zip(model.networks, inputs, strict=True)]
    assert join_gate_and_up(model) == (7, [])
    assert tried(caplog) == ["2 of 7 networks were tried"]
    for network, each, wanted in zip(model.networks, inputs, expected, strict=True):
        assert close(network(*each), wanted)


def test_of_layers_of_experts_that_are_alike_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[object] = []
    own = joins.are_rounding
    monkeypatch.setattr(joins, "are_rounding", lambda *args: evaluated.append(args) or own(*args))
    model = Model(experts)
    assert name_rows(model) == (6, [])
    assert len(evaluated) == 2, "gate and up are alike, and down"


def test_if_a_trial_fails_its_equals_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their projections are not even joined."""
    caplog.set_level(logging.DEBUG)
    model, made = Model(TwoInputs), []
    model.networks = [TwoInputs() for _ in range(5)] + [FeedForward()]
    own = joins.make_joint
    monkeypatch.setattr(joins, "make_joint", lambda layers: made.append(layers) or own(layers))
    assert join_gate_and_up(model) == (1, [f"networks.{i}" for i in reversed(range(5))])
    assert tried(caplog) == ["2 of 6 networks were tried"]
    assert len(made) == 2
    assert not any(isinstance(each, JoinedLinear) for network in model.networks[:5] for each in network.modules())


def test_a_network_that_is_equal_but_for_its_objects_is_left_as_it_was() -> None:
    model = Model(Copying)
    model.networks[0].copies = True  # the last one is tried first
    expected = model.networks[0](mx.ones((2, 1, INPUTS)))
    assert join_gate_and_up(model) == (1, ["networks.0"])
    assert mx.array_equal(model.networks[0](mx.ones((2, 1, INPUTS))), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"up_proj": nn.Linear(INPUTS, HIDDEN, bias=True)},
        {"up_proj": nn.Linear(INPUTS, HIDDEN, bias=False).to_quantized(32, 4)},
        {"up_proj": type("Own", (nn.Linear,), {})(INPUTS, HIDDEN, bias=False)},
        {"up_proj": nn.Identity()},
        {name: InParts() for name in ("gate_proj", "up_proj")},
    ],
    ids=["one biased", "one quantized", "own class", "none", "in parts"],
)
def test_unlike_layers_are_not_joined(change: dict[str, nn.Module]) -> None:
    model = Model(FeedForward)
    for network in model.networks:
        network.update_modules(change)
    assert join_gate_and_up(model) == (0, [])
    assert not any(isinstance(each, JoinedLinear) for each in model.modules())


def test_memory_grows_by_the_projections_of_one_network_at_most() -> None:
    model = nn.Module()
    model.networks = [FeedForward(inputs=1024, hidden=1024) for _ in range(12)]
    mx.eval(model.parameters())
    one = nbytes(model.networks[0])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert join_gate_and_up(model) == (12, [])
    assert mx.get_peak_memory() - before < one
    assert mx.get_active_memory() - before < one / 10


KINDS_OF_MODELS = ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5", "gemma3"]


@pytest.mark.parametrize("kind", every(2, KINDS_OF_MODELS))
def test_answers_are_the_same_with_joins_and_without(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, joined = str(make_architecture(tmp_path / "m", kind)), []
    monkeypatch.setattr(replacements, "join", lambda *args: joined.append(args[0]) or join(*args))
    answers = []
    for wanted in (False, True):
        config = EngineConfig(path, kv_cache_bytes=2**22, joins=wanted)
        core = load_core(config, time.monotonic, lambda *_: None)
        assert isinstance(core, EngineCore)
        assert len(joined) == wanted
        answers.append(run_requests(core, [list(range(3, 40)), [5, 6, 7]], max_tokens=12))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("kind", every(2, ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"]))
def test_a_loaded_model_is_joined_unless_that_is_turned_off(tmp_path: Path, kind: str, wanted: bool) -> None:
    """Loading checks the logits of batches beside mlx-lm's."""
    served = load_model(str(make_architecture(tmp_path / "m", kind)), LoadOptions(joins=wanted))
    names = {type(module).__name__ for module in served.model.modules()}
    assert any(name.startswith("JoinedRMSNorm") for name in names) == wanted
    assert any(hasattr(module, "joint_gate_up_proj") for module in served.model.modules()) == wanted
