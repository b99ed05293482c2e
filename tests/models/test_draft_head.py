"""Draft heads in the files of a model: names, types and values as the families and their conversions store them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.features import Feature
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from tests.models.architectures import make_architecture
from tests.models.draft_heads import Reference, make_drafting

Tensors = dict[str, mx.array]


def load(path: Path) -> ServedModel:
    return load_model(str(path), LoadOptions(drafts=True))


def head_of(path: Path) -> Tensors:
    served = load(path)
    assert served.mtp is not None, served.missing[Feature.DRAFT_HEAD]
    assert [served.layers[-1]] == served.mtp.specs(served.layers)
    weights: Any = tree_flatten(served.mtp.head)
    return dict(weights)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(mx.allclose(one[name], other[name]).item() for name in one)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_drafting(tmp_path_factory.mktemp("glm") / "m", "glm4_moe")


def stored_as(reference: Reference, change: Callable[[Tensors], Tensors], **metadata: str) -> Path:
    """The model's directory, in which the head's tensors are changed."""
    kept = reference.tensors
    reference.tensors = change(dict(kept))
    try:
        reference.save(**metadata)
    finally:
        reference.tensors = kept
    return reference.path


def one_by_one(tensors: Tensors) -> Tensors:
    """The experts as they are published."""
    found: Tensors = {}
    for name, array in tensors.items():
        if "switch_mlp" in name:
            for expert in range(array.shape[0]):
                part = name.replace("switch_mlp", f"experts.{expert}").replace("fc1", "up_proj")
                found[part.replace("fc2", "down_proj")] = array[expert]
        else:
            found[name] = array
    return found


@pytest.mark.parametrize("name", ["glm4_moe", "nemotron_h"])
def test_experts_one_by_one_and_copies_of_the_models_own_tensors(name: str, tmp_path: Path) -> None:
    reference = make_drafting(tmp_path / "m", name)

    def as_published(tensors: Tensors) -> Tensors:
        prefix = next(name for name in tensors if name.endswith("enorm.weight")).removesuffix("enorm.weight")
        return one_by_one(tensors) | {
            f"{prefix}embed_tokens.weight": mx.zeros((4, 4)),
            f"{prefix}shared_head.head.weight": mx.zeros((4, 4)),
        }

    expected = head_of(stored_as(reference, dict, format="mlx"))
    assert equal(head_of(stored_as(reference, as_published)), expected)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_scales_that_are_stored_less_one(tmp_path: Path, name: str) -> None:
    """Until a conversion to MLX adds it, which its files say."""
    reference = make_drafting(tmp_path / "m", name)
    converted = head_of(reference.path)

    def as_published(tensors: Tensors) -> Tensors:
        shifted = {name: array - 1 if array.ndim == 1 else array for name, array in tensors.items()}
        return one_by_one(shifted) if name == "qwen3_next" else shifted

    assert equal(head_of(stored_as(reference, as_published)), converted)
    assert not equal(head_of(stored_as(reference, as_published, format="mlx")), converted)


@pytest.mark.parametrize(("bits", "group_size", "mode"), [(4, 32, "affine"), (8, 64, "affine"), (4, 32, "mxfp4")])
def test_quantized_tensors_are_kept(glm: Reference, bits: int, group_size: int, mode: str) -> None:
    def quantized(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, array in tensors.items():
            base = name.removesuffix(".weight")
            if array.ndim < 2 or base.endswith("mlp.gate") or array.shape[-1] % group_size:
                found[name] = array
                continue
            parts = mx.quantize(array, group_size, bits, mode)
            found |= dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=False))
        return found

    plain = head_of(stored_as(glm, dict, format="mlx"))
    head = head_of(stored_as(glm, quantized, format="mlx"))
    assert head["projection.weight"].dtype == mx.uint32
    biases = head.get("projection.biases")
    back = mx.dequantize(head["projection.weight"], head["projection.scales"], biases, group_size, bits, mode)
    assert mx.abs(back - plain["projection.weight"]).max() < 0.2 * mx.abs(plain["projection.weight"]).max()


def test_a_model_without_a_head_is_served_without(tmp_path: Path) -> None:
    served = load(make_architecture(tmp_path / "m", "glm4_moe"))
    assert served.mtp is None
    assert served.missing[Feature.DRAFT_HEAD] == "it has no draft head"


def without_norm(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if "hnorm" not in name}


def of_another_size(tensors: Tensors) -> Tensors:
    return {name: array[..., :8] if "eh_proj" in name else array for name, array in tensors.items()}


@pytest.mark.parametrize(("change", "reason"), [(without_norm, "hidden"), (of_another_size, "projection")])
def test_a_head_that_does_not_fit_is_left_out(
    glm: Reference, change: Callable[[Tensors], Tensors], reason: str
) -> None:
    served = load(stored_as(glm, change, format="mlx"))
    assert served.mtp is None
    assert served.missing[Feature.DRAFT_HEAD].startswith("its draft head cannot be loaded: ")
    assert reason in served.missing[Feature.DRAFT_HEAD]
    assert len(served.layers) == len(load_model(str(glm.path)).layers)


def test_a_head_in_files_of_its_own(tmp_path: Path, glm: Reference) -> None:
    """In a file of any name, or in a directory, where its tensors may have no prefix."""
    expected = head_of(stored_as(glm, dict, format="mlx"))
    plain = make_architecture(tmp_path / "plain", "glm4_moe")
    apart = tmp_path / "apart"
    apart.mkdir()
    prefix = next(name for name in glm.tensors if name.endswith("enorm.weight")).removesuffix("enorm.weight")
    flat = {name.removeprefix(prefix): array for name, array in glm.tensors.items()}
    mx.save_safetensors(str(apart / "model.safetensors"), flat, {"format": "mlx"})
    for place in (glm.path / "model-head.safetensors", apart):
        served = load_model(str(plain), LoadOptions(drafts=True, mtp_path=str(place)))
        assert served.mtp is not None
        weights: Any = tree_flatten(served.mtp.head)
        assert equal(dict(weights), expected)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nowhere", "there is no such file or directory"),
        ("damaged.safetensors", "is not a safetensors file"),
        (".", "has no draft head"),
        ("a/b", "a/b"),
    ],
)
def test_a_place_without_a_head_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, reason: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"{}")
    model = make_architecture(tmp_path / "m", "glm4_moe")
    with pytest.raises(UnsupportedModelError, match=f"--mtp {place}: .*{reason}"):
        load_model(str(model), LoadOptions(drafts=True, mtp_path=place))


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    assert load(make_architecture(tmp_path / "m", "mamba")).missing[Feature.DRAFT_HEAD] == (
        "models of this kind have no draft head that is known"
    )
