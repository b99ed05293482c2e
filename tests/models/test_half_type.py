"""Models are computed in the other half type if they give the same logits: on M1 and M2, or if the user says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxpaged.attention.gpu import gpu_generation
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import loader
from mlxpaged.models.checks import half_type
from mlxpaged.models.checks.half_type import target_of
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from tests.models.architectures import make_architecture
from tests.support import cast, make_tiny_model, quantize, run_requests


def types_of(served: ServedModel) -> set[mx.Dtype]:
    weights: Any = tree_flatten(served.model.parameters())
    return {array.dtype for _, array in weights if mx.issubdtype(array.dtype, mx.floating)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return cast(make_tiny_model(tmp_path / "llama", "llama"), mx.bfloat16)


@pytest.fixture
def m1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "gpu_generation", lambda: 13)


@pytest.mark.parametrize(
    ("wanted", "dtype", "generation", "target"),
    [
        ("auto", "bfloat16", 13, mx.float16),
        ("auto", "bfloat16", 14, mx.float16),
        ("auto", "bfloat16", 15, None),
        ("auto", "bfloat16", None, None),
        ("auto", "float16", 13, None),
        ("auto", "float32", 13, None),
        ("float16", "bfloat16", 17, mx.float16),
        ("bfloat16", "float16", 13, mx.bfloat16),
        ("bfloat16", "bfloat16", 13, None),
        ("float16", "float32", 13, None),
        ("model", "bfloat16", 13, None),
    ],
)
def test_only_m1_and_m2_choose_float16_by_themselves(
    wanted: str, dtype: str, generation: int | None, target: mx.Dtype | None
) -> None:
    assert target_of(wanted, dtype, generation) == target


@pytest.mark.parametrize(
    ("architecture", "generation"),
    [("applegpu_g13s", 13), ("applegpu_g14p", 14), ("applegpu_g17g", 17), ("air64_v26", None)],
)
def test_the_generation_is_that_of_the_gpu(
    architecture: str, generation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_generation() is None, "this is a CPU"
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    assert gpu_generation() == generation


@pytest.mark.usefixtures("m1")
@pytest.mark.parametrize("bits", [None, 4])
def test_a_model_is_served_in_float16_on_an_m1_with_the_same_answers_as_its_checkpoint_in_float16(
    path: Path, tmp_path: Path, bits: int | None
) -> None:
    """Weights of this size are the same numbers in both types, so nothing but the activations' rounding differs."""
    if bits is not None:
        quantize(path, bits)
    served = load_model(str(path), LoadOptions(dtype="auto"))
    assert types_of(served) == {mx.float16}
    assert (served.dtype, served.kv_type) == ("float16", "mlx.core.float16")
    prompts = [[5, 6, 7] * 20, [8, 9]]
    expected = load_model(str(cast(path, mx.float16)))
    config = EngineConfig(kv_cache_bytes=1_000_000, max_step_ms=0)
    answers = [run_requests(build_engine(config, each), prompts, max_tokens=12) for each in (served, expected)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", "gpt_oss", "mamba2"])
def test_recurrent_models_and_mixtures_are_served_in_float16_too(name: str, tmp_path: Path) -> None:
    path = quantize(cast(make_architecture(tmp_path, name), mx.bfloat16), 4)
    served = load_model(str(path), LoadOptions(dtype="float16"))
    assert mx.bfloat16 not in types_of(served)
    run_requests(build_engine(EngineConfig(kv_cache_bytes=4_000_000, max_step_ms=0), served), [[5, 6, 7]], max_tokens=4)


def larger(path: Path, name: str, factor: float) -> Path:
    """Multiply one matrix. The next norm makes up for it: only numbers between them are larger."""
    weights: Any = mx.load(str(path / "model.safetensors"))
    found = [each for each in weights if name in each]
    assert found, sorted(weights)
    mx.save_safetensors(
        str(path / "model.safetensors"),
        {each: array * factor if each in found else array for each, array in weights.items()},
    )
    return path


@pytest.mark.usefixtures("m1")
@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_a_model_with_numbers_that_leave_no_room_keeps_its_type(
    path: Path, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As Gemma 3 has them. Its weights are read again if they were changed."""
    caplog.set_level("INFO")
    expected = load_model(str(larger(path, "embed_tokens", factor * 30)))
    served = load_model(str(path), LoadOptions(dtype="auto"))
    assert "the model is computed in bfloat16 and not in float16: it computes with numbers of" in caplog.text
    assert served.dtype == "bfloat16"
    for (_, one), (_, other) in zip(
        *(tree_flatten(each.model.parameters()) for each in (served, expected)), strict=True
    ):
        assert mx.array_equal(one, other)


@pytest.mark.usefixtures("m1")
def test_a_model_whose_logits_are_other_ones_then_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    recast = half_type.recast

    def broken(model: Any, *arguments: Any) -> None:
        recast(model, *arguments)
        model.model.norm.weight = mx.random.normal(model.model.norm.weight.shape).astype(mx.float16)

    monkeypatch.setattr(half_type, "recast", broken)
    served = load_model(str(path), LoadOptions(dtype="auto"))
    assert "its logits differ by" in caplog.text
    assert (served.dtype, types_of(served)) == ("bfloat16", {mx.bfloat16})


@pytest.mark.usefixtures("m1")
def test_a_layer_that_would_compute_in_float32_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLX makes float32 of a float16 and a bfloat16."""
    caplog.set_level("INFO")
    recast = half_type.recast

    def forgetting(model: Any, *arguments: Any) -> None:
        recast(model, *arguments)
        model.model.norm.weight = model.model.norm.weight.astype(mx.bfloat16)

    monkeypatch.setattr(half_type, "recast", forgetting)
    assert load_model(str(path), LoadOptions(dtype="auto")).dtype == "bfloat16"
    assert "computes partly in float32" in caplog.text


def test_what_the_user_asks_for_and_cannot_have_is_an_error(path: Path) -> None:
    larger(path, "embed_tokens", 1e6)
    with pytest.raises(UnsupportedModelError, match="--dtype float16 cannot be used: it computes with numbers of"):
        load_model(str(path), LoadOptions(dtype="float16"))


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of auto, float16, bfloat16"):
        EngineConfig(dtype="float64")
