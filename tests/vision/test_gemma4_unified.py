"""The embedder of a Gemma 4 without a tower computes what its definition says, and its files are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision.families.gemma.format import Gemma4Format
from mlxpaged.vision.families.gemma.gemma4_unified import Gemma4UnifiedSizes, Gemma4UnifiedTower
from tests.vision.definitions import Array, linear
from tests.vision.tiny import images
from tests.vision.tiny_gemma import features, weights_of, with_random_weights

SIZES = Gemma4UnifiedSizes(width=20, patch=8, places=9, eps=1e-3, output=15)

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_unified",
    "boi_token_id": 10,
    "eoi_token_id": 11,
    "image_token_id": 12,
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "mm_embed_dim": SIZES.width,
        "mm_posemb_size": SIZES.places,
        "rms_norm_eps": SIZES.eps,
    },
    "text_config": {"hidden_size": SIZES.output, "hidden_size_per_layer_input": 0},
}


def tiny_tower() -> Gemma4UnifiedTower:
    return with_random_weights(Gemma4UnifiedTower(SIZES))


def layer_norm(x: Array, weights: dict[str, Array], name: str) -> Array:
    centred = x - x.mean()
    return weights[f"{name}.weight"] * centred / math.sqrt((centred**2).mean() + 1e-5) + weights[f"{name}.bias"]


def reference_features(tower: Gemma4UnifiedTower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64."""
    weights = weights_of(tower)
    own = {name.removeprefix("vision_embedder."): w for name, w in weights.items()}
    out = []
    for row in range(image.shape[0] // 8):
        for column in range(image.shape[1] // 8):
            patch = image[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] / 255
            x = linear(layer_norm(patch.reshape(-1), own, "patch_ln1"), own, "patch_dense")
            place = own["pos_embedding"][column, 0] + own["pos_embedding"][row, 1]
            x = layer_norm(layer_norm(x, own, "patch_ln2") + place, own, "pos_norm")
            x = x / math.sqrt((x * x).mean() + SIZES.eps)
            out.append(weights["embed_vision.embedding_projection.weight"] @ x / math.sqrt(SIZES.output))
    return np.array(out)


@pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40)])
def test_features_are_those_of_the_definition(width: int, height: int) -> None:
    tower, several = tiny_tower(), images(2, width, height)
    for image, found in zip(several, features(tower, several), strict=True):
        wanted = reference_features(tower, image)
        assert found == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def files(path: Path, of_google: bool) -> Path:
    weights: dict[str, mx.array] = dict(tree_flatten(tiny_tower().parameters()))
    stored = {"model.embed_audio.embedding_projection.weight": mx.zeros((15, 20))}
    for name, weight in weights.items():
        if not of_google:
            name = name.replace("embed_vision.", "embed_vision.multimodal_embedder.")
            name = name.replace("vision_embedder.", "embed_vision.")
        stored[f"model.{name}"] = weight
    mx.save_safetensors(str(path / "model.safetensors"), stored)
    (path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 6}))
    return path


@pytest.mark.parametrize("of_google", [True, False])
def test_a_checkpoint_gives_its_tower(tmp_path: Path, of_google: bool) -> None:
    vision, reason = load_vision(ModelFiles(files(tmp_path, of_google)), CONFIG, dict, lambda done, total: None)
    assert vision is not None, reason
    assert vision.mutual == "windows"
    assert vision.format == Gemma4Format(start=10, placeholder=12, end=11, side=8, most=6)
    assert vision.tower.nbytes == tiny_tower().nbytes
    pixels = images(2, 24, 16)
    assert np.array_equal(features(vision.tower, pixels), features(tiny_tower(), pixels))


def test_a_configuration_that_does_not_fit_is_told(tmp_path: Path) -> None:
    config = CONFIG | {"vision_config": CONFIG["vision_config"] | {"mm_posemb_size": 5}}
    vision, reason = load_vision(ModelFiles(files(tmp_path, True)), config, dict, lambda done, total: None)
    assert vision is None
    assert "its images have up to 6 patches in a row, and its tower embeds 5" in reason
