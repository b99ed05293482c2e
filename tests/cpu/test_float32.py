"""Quantized and 16-bit weights become float32 on a CPU, one module at a time, if the memory has room for that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.cli.banner import computed
from mlxpaged.cpu import float32, streams
from mlxpaged.cpu.float32 import UNCHANGED, Choice, Sizes, Storage, choose, sizes_of, widen
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files import weights
from mlxpaged.models.layers import KV, leaves
from mlxpaged.models.loader import LoadOptions, ServedModel, load_embedding_model, load_model
from tests.models.encoders import make_encoder
from tests.support import cast, make_embedding_model, make_tiny_model, quantize

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only a CPU computes in another type")

MODES = ["affine", "mxfp4", "mxfp8", "nvfp4"]


def quantized_layers(mode: str) -> list[tuple[Any, mx.array, type[nn.Module]]]:
    """Layers, an input of each, and the classes that they get."""
    x = mx.random.normal((3, 64), key=mx.random.key(1))
    experts = mx.array([[[0], [2]]] * 3).reshape(3, 2)
    layers: list[tuple[Any, mx.array, type[nn.Module]]] = [
        (nn.Linear(64, 32), x, nn.Linear),
        (nn.Linear(64, 32, bias=False), x, nn.Linear),
        (nn.Embedding(32, 64), mx.array([0, 5, 31]), nn.Embedding),
        (MultiLinear(64, 32, 4), mx.broadcast_to(x, (1, 4, 3, 64)), MultiLinear),
    ]
    made = [(layer.to_quantized(**settings(mode)), given, own) for layer, given, own in layers]
    switch = SwitchLinear(64, 32, 4, bias=False).to_quantized(**settings(mode))
    return [*made, (Experts(switch, experts), x, SwitchLinear)]


class Experts(nn.Module):
    """Experts with fixed indices: [3, 64] -> [3, 2, 1, 32]"""

    def __init__(self, experts: Any, indices: mx.array) -> None:
        super().__init__()
        self.experts, self.indices = experts, indices

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.experts(x[:, None, None], self.indices)
        return out


def settings(mode: str) -> dict[str, Any]:
    sizes = {"affine": (32, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
    group_size, bits = sizes[mode]
    return {"group_size": group_size, "bits": bits, "mode": mode}


@on_cpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", range(5))
def test_a_quantized_layer_becomes_a_plain_one_with_the_same_outputs(mode: str, index: int) -> None:
    layer, x, own = quantized_layers(mode)[index]
    expected = layer(x)
    sizes = sizes_of(layer)
    widen(layer, Storage.DENSE)
    inner = layer.experts if isinstance(layer, Experts) else layer
    assert type(inner) is own
    assert "scales" not in inner
    assert not hasattr(inner, "bits")
    assert sizes_of(layer) == Sizes(sizes.dense, sizes.dense, sizes.dense)
    assert layer(x).dtype == mx.float32
    rounding = 2e-5 if expected.dtype == mx.float32 else 2.0**-8  # MLX makes rows of bfloat16 of some embeddings
    np.testing.assert_allclose(np.array(layer(x)), np.array(expected.astype(mx.float32)), atol=rounding, rtol=rounding)


@on_cpu
def test_scales_alone_keep_the_bits_of_the_weights() -> None:
    layer: Any = nn.Linear(64, 32).to_quantized(group_size=32, bits=4)
    layer.set_dtype(mx.bfloat16)
    packed, scales = layer.weight, layer.scales
    sizes = sizes_of(layer)
    widen(layer, Storage.SCALES)
    assert type(layer) is nn.QuantizedLinear
    assert mx.array_equal(layer.weight, packed)
    assert layer.scales.dtype == layer.biases.dtype == layer.bias.dtype == mx.float32
    assert mx.array_equal(layer.scales, scales.astype(mx.float32))
    assert sizes_of(layer).model == sizes.scales


def test_an_expert_with_one_more_scale_stays_quantized() -> None:
    experts: Any = SwitchLinear(64, 32, 4, bias=False).to_quantized(16, 4, "nvfp4", True)
    assert experts.global_scale is not None
    widen(experts, Storage.DENSE)
    assert "scales" in experts
    assert sizes_of(experts).dense == sizes_of(experts).scales


class WithLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [mx.ones(4, mx.bfloat16), mx.ones(4, mx.int32)]
        self.layers = [nn.RMSNorm(4), nn.RMSNorm(4)]
        self._hidden = mx.ones(4, mx.float16)
        self.name = "x"


def test_arrays_in_lists_and_hidden_ones_become_float32_and_lists_of_layers_stay() -> None:
    module = WithLists()
    module.set_dtype(mx.bfloat16)
    layers = module.layers
    widen(module, Storage.DENSE)
    assert [array.dtype for array in module.rows] == [mx.float32, mx.int32]
    assert dict(module.items())["_hidden"].dtype == mx.float32
    assert module.layers is layers
    assert {norm.weight.dtype for norm in layers} == {mx.float32}


def test_a_shared_layer_is_counted_and_converted_once() -> None:
    norm = nn.RMSNorm(8)
    both = nn.Sequential(norm, norm)
    assert sizes_of(both).model == 32


@pytest.mark.parametrize(
    ("dtype", "free", "storage"),
    [
        ("auto", 135, Storage.DENSE),
        ("auto", 133, Storage.SCALES),
        ("auto", 17, Storage.SCALES),
        ("auto", 15, Storage.MODEL),
        ("model", 1000, Storage.MODEL),
        ("float32", 101, Storage.DENSE),
    ],
)
def test_the_free_memory_decides(monkeypatch: pytest.MonkeyPatch, dtype: str, free: int, storage: Storage) -> None:
    """A quarter of it is left to others."""
    monkeypatch.setattr(streams, "on_cpu", lambda: True)
    choice = choose(dtype, Sizes(10, 12, 100), reserved=0, free=lambda: free)
    assert choice.storage is storage
    assert bool(choice.reason) == (dtype == "auto" and storage is not Storage.DENSE)


def test_what_is_reserved_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "on_cpu", lambda: True)
    sizes = Sizes(10, 12, 100)
    assert choose("auto", sizes, reserved=10, free=lambda: 135).storage is Storage.SCALES
    assert choose("auto", sizes, reserved=10, free=lambda: 145).storage is Storage.DENSE


def test_float32_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "on_cpu", lambda: True)
    with pytest.raises(MemoryError, match=r"in float32 take 0\.1 GB, but only 0\.0 GB"):
        choose("float32", Sizes(10, 12, 10**8), reserved=0, free=lambda: 10**7)


def half_model(path: Path, kind: str) -> Path:
    made = make_tiny_model(path, "llama", num_hidden_layers=3, tie_word_embeddings=True)
    cast(made, mx.bfloat16)
    return quantize(made, bits=4) if kind == "4 bits" else made


def dtypes_of(served: ServedModel) -> set[mx.Dtype]:
    parameters: Any = tree_flatten(served.model.parameters())
    return {array.dtype for _, array in parameters} | {spec.dtype for spec in leaves(served.layers) if type(spec) is KV}


@on_cpu
@pytest.mark.parametrize("kind", ["bfloat16", "4 bits"])
def test_a_model_is_computed_in_float32_with_its_keys_and_values(tmp_path: Path, kind: str) -> None:
    path = half_model(tmp_path / "m", kind)
    served = load_model(str(path), LoadOptions(cpu_dtype="auto"))
    assert dtypes_of(served) == {mx.float32}
    assert (served.dtype, served.stored.storage) == ("float32", Storage.DENSE)
    stored: Any = mx.load(str(path / "model.safetensors"))
    assert served.checkpoint_bytes == sum(array.nbytes for array in stored.values())
    assert served.weight_bytes == 4 * served.num_parameters
    kept = load_model(str(path), LoadOptions(cpu_dtype="model"))
    assert (kept.dtype, kept.stored.storage) == ("bfloat16", Storage.MODEL)
    assert mx.bfloat16 in dtypes_of(kept)


@on_cpu
def test_without_memory_only_the_scales_are_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = half_model(tmp_path / "m", "4 bits")
    sizes = sizes_of(load_plain_model(path, lazy=True)[0])
    monkeypatch.setattr(weights, "free_device_memory", lambda: int(sizes.scales / float32.SHARE) + 1)
    served = load_model(str(path), LoadOptions(cpu_dtype="auto"))
    assert served.stored.storage is Storage.SCALES
    assert dtypes_of(served) == {mx.float32, mx.uint32}
    assert served.weight_bytes == sizes.scales


@on_cpu
def test_float32_without_memory_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "free_device_memory", lambda: 1000)
    with pytest.raises(UnsupportedModelError, match=r"in float32 take .*leave out --cpu-dtype"):
        load_model(str(half_model(tmp_path / "m", "4 bits")), LoadOptions(cpu_dtype="float32"))


@pytest.mark.parametrize("kind", ["bfloat16", "4 bits"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_on_a_gpu_every_weight_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """The path of a Mac, up to where the operations run: the parameters have the bytes and the types of the file."""
    monkeypatch.setattr(streams, "on_cpu", lambda: False)
    path = half_model(tmp_path / "m", kind)
    served = load_model(str(path), LoadOptions(cpu_dtype=dtype, joins=False))
    expected: Any = mx.load(str(path / "model.safetensors"))
    found: Any = dict(tree_flatten(served.model.parameters()))
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert bytes(memoryview(found[name].view(mx.uint8))) == bytes(memoryview(array.view(mx.uint8))), name
    assert (served.dtype, served.stored.storage) == ("bfloat16", Storage.MODEL)


@on_cpu
def test_memory_never_holds_a_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are read, at most all of them in float32 and one module more are held."""
    path = half_model(tmp_path / "m", "4 bits")
    model = load_plain_model(path, lazy=True)[0]
    leaves_of: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    sizes, largest = sizes_of(model), max(sizes_of(module).dense for _, module in leaves_of)
    mx.set_cache_limit(0)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    widen(model, Storage.DENSE)
    assert mx.get_peak_memory() - before <= sizes.dense + 2 * largest


@pytest.mark.parametrize(
    ("choice", "dtype", "line"),
    [
        (
            Choice(Storage.DENSE),
            "float32",
            "computed  in float32: the weights take 4.0 MB instead of 1.0 MB (--cpu-dtype)",
        ),
        (Choice(Storage.SCALES, "why"), "float32", "computed  in float32, with quantized weights: why"),
        (Choice(Storage.MODEL, "why"), "bfloat16", "slower    computed in bfloat16: why"),
        (UNCHANGED, "bfloat16", "computed  in bfloat16"),
    ],
)
def test_the_banner_says_what_is_computed_in(choice: Choice, dtype: str, line: str) -> None:
    info: Any = SimpleNamespace(stored=choice, dtype=dtype, weight_bytes=4_000_000, checkpoint_bytes=1_000_000)
    assert computed(info) == line


@on_cpu
def test_an_adapter_of_16_bits_becomes_float32_too(tmp_path: Path) -> None:
    path = half_model(tmp_path / "m", "4 bits")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"num_layers": 3, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load_plain_model(path)
    layers = [name for name, module in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
    arrays = {}
    for name in layers:
        lora: Any = LoRALinear.from_base(dict(model.named_modules())[name], r=4)
        for part in ("lora_a", "lora_b"):
            arrays[f"{name}.{part}"] = (mx.random.normal(lora[part].shape) / 8).astype(mx.bfloat16)
    config["lora_parameters"]["keys"] = ["self_attn.q_proj", "self_attn.v_proj"]  # type: ignore[index]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), arrays)
    served = load_model(str(path), LoadOptions(adapters=[AdapterPath("style", adapter)], cpu_dtype="auto"))
    assert served.adapters.nbytes == 4 * sum(array.size for array in arrays.values())


@on_cpu
def test_a_report_can_end_the_conversion(tmp_path: Path) -> None:
    class Unwanted(Exception):
        pass

    def report(done: int, total: int) -> None:
        assert done <= total
        if done > total / 2:
            raise Unwanted

    model = load_plain_model(half_model(tmp_path / "m", "4 bits"), lazy=True)[0]
    with pytest.raises(Unwanted):
        widen(model, Storage.DENSE, report)


@on_cpu
@pytest.mark.parametrize("kind", ["bert", "decoder"])
def test_embeddings_are_computed_in_float32(tmp_path: Path, kind: str) -> None:
    path = make_encoder(tmp_path / "m", "bert") if kind == "bert" else make_embedding_model(tmp_path / "m")
    file = str(path / "model.safetensors")
    stored: Any = mx.load(file)
    numbers = {name: array.astype(mx.bfloat16) for name, array in stored.items() if array.dtype == mx.float32}
    mx.save_safetensors(file, stored | numbers)
    half, whole = (load_embedding_model(str(path), None, 64, cpu_dtype=dtype) for dtype in ("model", "auto"))
    assert whole.weight_bytes == 2 * half.weight_bytes


@on_cpu
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_quantized_embedding_are_float32_in_either_storage(mode: str) -> None:
    for storage in (Storage.SCALES, Storage.DENSE):
        layer: Any = nn.Embedding(32, 64).to_quantized(**settings(mode))
        layer.set_dtype(mx.bfloat16)
        sizes = sizes_of(layer)
        widen(layer, storage)
        assert layer(mx.array([0, 5])).dtype == mx.float32
        assert sizes_of(layer).model == (sizes.dense if storage is Storage.DENSE else sizes.scales)
