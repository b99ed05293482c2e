"""A vision tower is loaded from all layouts of checkpoints, or the reason why the model sees nothing is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.families.pixtral.tower import MEAN, PixtralSizes, PixtralTower
from mlxpaged.vision.family import colours_of
from mlxpaged.vision.tower import Vision
from tests.vision.tiny import MERGED, PLAIN, features, images, tiny_tower

VOCABULARY = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
PATCHES = "vision_tower.patch_conv.weight"


def config_of(sizes: PixtralSizes, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "image_token_index": 10,
        "spatial_merge_size": sizes.merge or 1,
        "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.blocks,
            "num_attention_heads": sizes.heads,
            "patch_size": sizes.patch,
            "image_size": 64,
            "hidden_act": sizes.activation,
            "rope_theta": sizes.rope_base,
        },
        "text_config": {"hidden_size": sizes.output, "rms_norm_eps": sizes.merger_eps},
    }


PREPROCESSOR = {"image_mean": MERGED.mean, "image_std": MERGED.std, "size": {"longest_edge": 64}}
MISTRAL3 = config_of(MERGED, "mistral3")


def torch_weights(tower: PixtralTower, prefix: str = "") -> dict[str, mx.array]:
    """With the patches as torch's convolution has them, [width, colours, side, side]."""
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    side = tower.sizes.patch
    weights[PATCHES] = weights[PATCHES].reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    return {prefix + name: mx.contiguous(weight) for name, weight in weights.items()}


def save(path: Path, weights: dict[str, mx.array], preprocessor: dict[str, Any] | None = PREPROCESSOR) -> Path:
    mx.save_safetensors(str(path / "model.safetensors"), {**weights, "language_model.norm.weight": mx.ones(16)})
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


def load(path: Path, config: dict[str, Any] = MISTRAL3, vocabulary: dict[str, int] = VOCABULARY) -> Vision:
    vision, reason = load_vision(ModelFiles(path), config, lambda: vocabulary, lambda done, total: None)
    assert vision is not None, reason
    assert not reason
    return vision


def refusal(path: Path, config: dict[str, Any] = MISTRAL3, vocabulary: dict[str, int] = VOCABULARY) -> str:
    vision, reason = load_vision(ModelFiles(path), config, lambda: vocabulary, lambda done, total: None)
    assert vision is None
    return reason


def loaded_features(vision: Vision) -> Any:
    assert isinstance(vision.tower, PixtralTower)
    return features(vision.tower, images(2, 24, 16))


@pytest.mark.parametrize("kind", ["mistral3", "pixtral", "llava"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_of_transformers_gives_its_tower(tmp_path: Path, kind: str, prefix: str) -> None:
    sizes = MERGED if kind == "mistral3" else PLAIN
    tower = tiny_tower(sizes)
    vision = load(save(tmp_path, torch_weights(tower, prefix)), config_of(sizes, kind))
    assert np.array_equal(loaded_features(vision), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


def test_a_checkpoint_of_mlx_vlm_gives_its_tower(tmp_path: Path) -> None:
    """It has patches as MLX's convolution takes them, and another part of the tower in the names."""
    tower = tiny_tower(MERGED)
    weights = torch_weights(tower)
    weights[PATCHES] = mx.contiguous(weights[PATCHES].transpose(0, 2, 3, 1))
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    assert np.array_equal(loaded_features(load(save(tmp_path, renamed))), features(tower, images(2, 24, 16)))


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantized_layers_stay_quantized(tmp_path: Path, bits: int, mode: str) -> None:
    sizes = replace(MERGED, width=64, hidden=64, heads=2, output=64)
    tower = tiny_tower(sizes)
    nn.quantize(tower, 32, bits, mode=mode, class_predicate=lambda name, module: "layers" in name and "proj" in name)
    config = config_of(sizes, "mistral3") | {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    vision = load(save(tmp_path, torch_weights(tower)), config)
    assert np.array_equal(loaded_features(vision), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


def test_the_weights_may_be_in_several_files(tmp_path: Path) -> None:
    tower = tiny_tower(MERGED)
    weights = torch_weights(tower)
    save(tmp_path, {})
    for i, part in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        mx.save_safetensors(str(tmp_path / f"model-0000{i}.safetensors"), {name: weights[name] for name in part})
    assert np.array_equal(loaded_features(load(tmp_path)), features(tower, images(2, 24, 16)))


def test_only_the_towers_weights_are_read(tmp_path: Path) -> None:
    tower = tiny_tower(MERGED)
    amounts: list[tuple[int, int]] = []
    save(tmp_path, torch_weights(tower))
    load_vision(ModelFiles(tmp_path), MISTRAL3, lambda: VOCABULARY, lambda done, total: amounts.append((done, total)))
    assert amounts[0] == (0, tower.nbytes)
    assert amounts[-1] == (tower.nbytes, tower.nbytes)


def test_a_report_may_end_the_load(tmp_path: Path) -> None:
    def unwanted(done: int, total: int) -> None:
        raise InterruptedError

    save(tmp_path, torch_weights(tiny_tower(MERGED)))
    with pytest.raises(InterruptedError):
        load_vision(ModelFiles(tmp_path), MISTRAL3, lambda: VOCABULARY, unwanted)


def test_the_format_follows_the_files(tmp_path: Path) -> None:
    save(tmp_path, torch_weights(tiny_tower(MERGED)))
    assert load(tmp_path).format == PixtralFormat(placeholder=10, row_end=12, end=13, longest=(64, 64), side=8)
    size: dict[str, Any] = {"size": {"width": 32, "height": 48}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_break_token": "<row>"}))
    config = {name: value for name, value in MISTRAL3.items() if name != "image_token_index"}
    vision = load(tmp_path, config, {"[IMG]": 5, "<row>": 6, "[IMG_END]": 7})
    assert vision.format == PixtralFormat(placeholder=5, row_end=6, end=7, longest=(32, 48), side=8)
    assert load(tmp_path, config | {"image_token_id": 8}, {"<row>": 6, "[IMG_END]": 7}).format.placeholder == 8


def test_the_settings_of_images_may_be_in_the_processors_file(tmp_path: Path) -> None:
    tower = tiny_tower(MERGED)
    save(tmp_path, torch_weights(tower), preprocessor=None)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PREPROCESSOR}))
    assert np.array_equal(loaded_features(load(tmp_path)), features(tower, images(2, 24, 16)))


def test_without_settings_images_are_normalized_as_for_clip(tmp_path: Path) -> None:
    vision = load(save(tmp_path, torch_weights(tiny_tower(MERGED)), preprocessor=None))
    assert isinstance(vision.tower, PixtralTower)
    assert vision.tower.sizes.mean == MEAN
    assert isinstance(vision.format, PixtralFormat)
    assert vision.format.longest == (64, 64)


def test_a_model_of_text_gives_no_reason(tmp_path: Path) -> None:
    assert refusal(save(tmp_path, {}), {"model_type": "qwen3"}) == ""


@pytest.mark.parametrize(
    ("kind", "vision_type"),
    [
        ("gemma3", "clip_vision_model"),
        ("kimi_k3", "moonvit"),
        ("llava", "clip_vision_model"),
        ("mistral3", None),
    ],
)
def test_a_family_without_a_tower_is_named(tmp_path: Path, kind: str, vision_type: str | None) -> None:
    config = {"model_type": kind, "vision_config": {"model_type": vision_type}}
    assert refusal(save(tmp_path, {}), config) == f"images are not supported yet for {kind} models"


@pytest.mark.parametrize(("kind", "reason"), [("deepseek_v41", "experts"), ("muse_spark", "Metal")])
def test_a_family_that_cannot_see_says_why(tmp_path: Path, kind: str, reason: str) -> None:
    found = refusal(save(tmp_path, {}), {"model_type": kind, "vision_config": {}})
    assert found.startswith(f"images are not supported yet for {kind} models: ")
    assert reason in found


def test_a_checkpoint_from_which_mlx_lm_dropped_the_tower_is_told(tmp_path: Path) -> None:
    assert refusal(save(tmp_path, {})) == "its checkpoint has no vision tower"


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    weights = torch_weights(tiny_tower(MERGED))
    del weights["vision_tower.transformer.layers.1.ffn_norm.weight"]
    reason = refusal(save(tmp_path, weights))
    assert reason.startswith("its vision tower cannot be loaded: Missing 1 parameters")
    assert "layers.1.ffn_norm.weight" in reason


@pytest.mark.parametrize(
    ("name", "weight", "reason"),
    [
        ("multi_modal_projector.linear_1.weight", mx.zeros((16, 25)), "shape"),
        (PATCHES, mx.zeros((24, 3, 5, 5)), "shape"),
        ("vision_tower.ln_pre.weight", mx.zeros(24, mx.uint8), "ln_pre.weight has the type mlx.core.uint8"),
        ("vision_tower.transformer.layers.2.ffn_norm.weight", mx.zeros(24), "not in model"),
        ("multi_modal_projector.linear_1.bias", mx.zeros(16), "not in model"),
    ],
)
def test_a_weight_that_does_not_fit_is_named(tmp_path: Path, name: str, weight: mx.array, reason: str) -> None:
    weights = torch_weights(tiny_tower(MERGED)) | {name: weight}
    found = refusal(save(tmp_path, weights))
    assert found.startswith("its vision tower cannot be loaded: ")
    assert reason in found
    assert name in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vision_feature_layer": -2}, "its features come from layer -2 instead of the last"),
        ({"vision_feature_layer": [-1, -5]}, r"its features come from layer [-1, -5] instead of the last"),
        ({"projector_hidden_act": "tanh"}, "its activation tanh is none of gelu, silu"),
    ],
)
def test_a_config_that_no_tower_can_have_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    found = refusal(save(tmp_path, torch_weights(tiny_tower(MERGED))), MISTRAL3 | change)
    assert found.startswith("its vision tower cannot be loaded: ")
    assert reason in found


def test_llava_takes_the_last_layer_but_one_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    config = config_of(PLAIN, "llava")
    del config["vision_feature_layer"]
    assert "from layer -2" in refusal(save(tmp_path, torch_weights(tiny_tower(PLAIN))), config)


@pytest.mark.parametrize("missing", ["[IMG_BREAK]", "[IMG_END]"])
def test_a_tokenizer_without_the_images_tokens_is_told(tmp_path: Path, missing: str) -> None:
    vocabulary = {text: i for text, i in VOCABULARY.items() if text != missing}
    reason = refusal(save(tmp_path, torch_weights(tiny_tower(MERGED))), vocabulary=vocabulary)
    assert reason == f"its vision tower cannot be loaded: its tokenizer has no {missing}"


@pytest.mark.parametrize(
    ("preprocessor", "reason"),
    [
        ({"image_std": [0.5, 0, 0.5]}, "its pixels cannot be normalized by the mean"),
        ({"image_mean": [0.5]}, "its pixels cannot be normalized by the mean"),
        ({"do_rescale": False}, "its pixels are not divided by 255"),
        ({"rescale_factor": 1}, "its pixels are not divided by 255"),
        ({"size": {"longest_edge": "large"}}, "the size of its images is {'longest_edge': 'large'}"),
        ({"size": {"height": 5}}, "the size of its images is {'height': 5}"),
        ({"size": {"longest_edge": -1}}, "the size of its images is {'longest_edge': -1}"),
    ],
)
def test_settings_that_make_no_pixels_are_told(tmp_path: Path, preprocessor: dict[str, Any], reason: str) -> None:
    assert reason in refusal(save(tmp_path, torch_weights(tiny_tower(MERGED)), preprocessor))


def test_pixels_are_normalized_unless_the_files_say_otherwise() -> None:
    own, default = (0.1, 0.2, 0.3), (0.5, 0.5, 0.5)
    assert colours_of({"rescale_factor": 0.00392156862745098, "image_mean": own}, default, default) == (own, default)
    assert colours_of({"do_normalize": False, "image_mean": own}, default, default) == ((0.0,) * 3, (1.0,) * 3)


def test_a_file_that_is_not_json_is_told(tmp_path: Path) -> None:
    save(tmp_path, torch_weights(tiny_tower(MERGED)))
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert "preprocessor_config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", -1), ("patch_size", 0), ("num_attention_heads", "8")],
)
def test_sizes_of_no_tower_are_refused_before_it_is_made(tmp_path: Path, name: str, value: Any) -> None:
    config = MISTRAL3 | {"vision_config": MISTRAL3["vision_config"] | {name: value}}
    reason = refusal(save(tmp_path, torch_weights(tiny_tower(MERGED))), config)
    assert reason == f"its vision tower cannot be loaded: its {name} is {value}"


def test_an_image_has_no_more_pixels_than_the_server_is_told(tmp_path: Path) -> None:
    save(tmp_path, torch_weights(tiny_tower(MERGED)))
    given = ModelFiles(tmp_path), MISTRAL3, lambda: VOCABULARY, lambda done, total: None
    vision, reason = load_vision(*given, most_pixels=1024)
    assert vision is not None, reason
    assert vision.format.size(640, 640) == (32, 32)
    assert load(tmp_path).format.size(640, 640) == (64, 64)
    off = load_vision(*given, most_pixels=0)
    assert off == (None, "images are turned off by --max-image-pixels 0")
