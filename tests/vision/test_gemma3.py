"""The tower of Gemma 3 computes what its definition says, and its files are read in all layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.families.gemma.format import Gemma3Format
from mlxpaged.vision.families.gemma.gemma3 import Gemma3Sizes, Gemma3Tower
from mlxpaged.vision.tower import Vision
from tests.vision.definitions import Array, gelu_of_tanh, linear, mixed_heads, norm
from tests.vision.tiny import images
from tests.vision.tiny_gemma import features, weights_of, with_random_weights

SIZES = Gemma3Sizes(
    width=24,
    hidden=20,
    blocks=2,
    heads=3,
    patch=4,
    patches=6,
    pool=3,
    eps=1e-6,
    output=15,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)
SIDE = SIZES.patch * SIZES.patches

TEXT_FACTOR = 3.875
"""The root of 15, rounded to bfloat16."""

VOCABULARY = {"\n": 3, "\n\n": 4, "\n\n\n": 5, "\n\n\n\n": 6, "a\n": 7, "a\n\n\n": 8, "<start_of_image>": 10}
VOCABULARY |= {"<end_of_image>": 11, "<image_soft_token>": 12}

CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "boi_token_index": 10,
    "eoi_token_index": 11,
    "image_token_index": 12,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": SIZES.width,
        "intermediate_size": SIZES.hidden,
        "num_hidden_layers": SIZES.blocks,
        "num_attention_heads": SIZES.heads,
        "patch_size": SIZES.patch,
        "image_size": SIDE,
        "vision_use_head": False,
    },
    "text_config": {"model_type": "gemma3_text", "hidden_size": SIZES.output},
}
PREPROCESSOR = {
    "image_mean": SIZES.mean,
    "image_std": SIZES.std,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "do_pan_and_scan": None,
}


def tiny_tower(dtype: mx.Dtype = mx.float32) -> Gemma3Tower:
    return with_random_weights(Gemma3Tower(SIZES), dtype)


def reference_features(tower: Gemma3Tower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64, with one loop for each sum."""
    weights = weights_of(tower)
    of_tower = {name.removeprefix("vision_tower."): w for name, w in weights.items()}
    sizes, side = tower.sizes, tower.sizes.patch
    rows, columns = image.shape[0] // side, image.shape[1] // side
    state = []
    for row in range(rows):
        for column in range(columns):
            patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
            colours = (patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)
            place = of_tower["embeddings.position_embedding.weight"][row * sizes.patches + column]
            state.append(linear(colours.reshape(-1), of_tower, "embeddings.patch_embedding") + place)
    for number in range(sizes.blocks):
        own = {name.removeprefix(f"encoder.layers.{number}."): w for name, w in of_tower.items()}
        normed = [norm(x, own, "layer_norm1") for x in state]
        heads = [
            np.array([linear(x, own, f"self_attn.{name}_proj").reshape(sizes.heads, -1) for name in "qkv"])
            for x in normed
        ]
        mixed = mixed_heads(heads, [(0, 0)] * len(heads), lambda one, other: True)
        state = [x + linear(y.reshape(-1), own, "self_attn.out_proj") for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            inner = gelu_of_tanh(linear(norm(x, own, "layer_norm2"), own, "mlp.fc1"))
            state[i] = x + linear(inner, own, "mlp.fc2")
    state = [norm(x, of_tower, "post_layernorm") for x in state]
    out = []
    for row in range(0, rows, sizes.pool):
        for column in range(0, columns, sizes.pool):
            pooled = np.zeros(sizes.width)
            for i in range(sizes.pool):
                for j in range(sizes.pool):
                    pooled += state[(row + i) * columns + column + j] / sizes.pool**2
            pooled /= np.sqrt((pooled**2).mean() + sizes.eps)
            pooled *= 1 + weights["multi_modal_projector.mm_soft_emb_norm.weight"]
            out.append(pooled @ weights["multi_modal_projector.mm_input_projection_weight"] / TEXT_FACTOR)
    return np.array(out)


@pytest.mark.parametrize(("width", "height"), [(SIDE, SIDE), (SIDE // 2, SIDE), (SIDE // 2, SIDE // 2)])
def test_features_are_those_of_the_definition(width: int, height: int) -> None:
    """Those of smaller images too, which the probe shows."""
    tower, [image] = tiny_tower(), images(1, width, height)
    wanted = reference_features(tower, image)
    assert wanted.shape == (4 * width * height // SIDE**2, SIZES.output)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


def test_a_batch_has_the_features_of_each_image_alone() -> None:
    tower, several = tiny_tower(), images(3, SIDE, SIDE)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_an_encoding_has_parts() -> None:
    tower, pixels = tiny_tower(), images(2, SIDE, SIDE)
    whole, parts = features(tower, pixels), []
    for part in tower.encode(mx.array(pixels)):
        mx.eval(part)
        parts.append(part)
    assert len(parts) == 2 * SIZES.blocks + 1
    assert np.array_equal(np.array(parts[-1]), whole)


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(), images(2, SIDE, SIDE)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_weights_give_near_features_of_their_type(dtype: mx.Dtype) -> None:
    tower, pixels = tiny_tower(dtype), images(1, SIDE, SIDE)
    *_, last = tower.encode(mx.array(pixels))
    assert last.dtype == dtype
    wanted = reference_features(tower, pixels[0])
    assert features(tower, pixels)[0] == pytest.approx(wanted, abs=0.1 * float(np.abs(wanted).max()))


def form() -> Gemma3Format:
    joins = {(3, 4): 5, (4, 3): 5, (4, 4): 6}
    return Gemma3Format(start=10, placeholder=12, end=11, newlines=4, side=SIDE, rows=2, joins=joins)


@pytest.mark.parametrize("size", [(1, 1), (24, 24), (4000, 100)])
def test_all_images_have_one_size_and_one_count_of_tokens(size: tuple[int, int]) -> None:
    assert form().size(*size) == (SIDE, SIDE)
    assert form().grid(SIDE, SIDE) == (2, 2)
    assert form().tokens(SIDE, SIDE) == [4, 10, 12, 12, 12, 12, 11, 4]
    assert (form().template_token, form().placeholder) == (10, 12)


def test_settings_differ_if_pixels_do() -> None:
    other: list[dict[str, Any]] = [{}, {"side": 48}, {"resampling": "BICUBIC"}]
    assert len({replace(form(), **change).settings for change in other}) == 3


def files(path: Path, tower: Gemma3Tower, prefix: str, inner: str, of_torch: bool) -> Path:
    """Writes a checkpoint, with a head of SigLIP that Gemma does not use."""
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    name = "vision_tower.embeddings.patch_embedding.weight"
    patches = weights[name].reshape(-1, tower.sizes.patch, tower.sizes.patch, 3)
    weights[name] = patches.transpose(0, 3, 1, 2) if of_torch else patches
    stored = {
        prefix + name.replace("vision_tower.", f"vision_tower.{inner}"): mx.contiguous(weight)
        for name, weight in weights.items()
    }
    stored[f"{prefix}vision_tower.{inner}head.probe"] = mx.zeros((1, 1, 24))
    stored[f"{prefix}vision_tower.{inner}embeddings.position_ids"] = mx.arange(36)[None]
    stored["language_model.model.norm.weight"] = mx.ones(16)
    mx.save_safetensors(str(path / "model.safetensors"), stored)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


def load(
    path: Path, config: dict[str, Any] = CONFIG, vocabulary: dict[str, int] = VOCABULARY, **more: int
) -> tuple[Vision | None, str]:
    return load_vision(ModelFiles(path), config, lambda: vocabulary, lambda done, total: None, **more)


@pytest.mark.parametrize(
    ("prefix", "inner", "of_torch"),
    [
        ("", "vision_model.", True),
        ("model.", "vision_model.", True),
        ("model.", "", True),
        ("", "vision_model.", False),
    ],
)
def test_a_checkpoint_gives_its_tower(tmp_path: Path, prefix: str, inner: str, of_torch: bool) -> None:
    vision, reason = load(files(tmp_path, tiny_tower(), prefix, inner, of_torch))
    assert vision is not None, reason
    assert vision.mutual == "all"
    assert (vision.axes, vision.num_deep) == (None, 0)
    assert vision.format == form()
    assert vision.tower.nbytes == tiny_tower().nbytes
    pixels = images(2, SIDE, SIDE)
    assert np.array_equal(features(vision.tower, pixels), features(tiny_tower(), pixels))


def test_quantized_layers_stay_quantized(tmp_path: Path) -> None:
    sizes = replace(SIZES, width=64, hidden=64, heads=2)
    tower = with_random_weights(Gemma3Tower(sizes))
    nn.quantize(
        tower, 32, 4, class_predicate=lambda name, module: "patch" not in name and hasattr(module, "to_quantized")
    )
    assert isinstance(tower.vision_tower.embeddings["position_embedding"], nn.QuantizedEmbedding)
    seen = CONFIG["vision_config"] | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    vision, reason = load(files(tmp_path, tower, "", "vision_model.", False), CONFIG | {"vision_config": seen})
    assert vision is not None, reason
    pixels = images(2, SIDE, SIDE)
    assert np.array_equal(features(vision.tower, pixels), features(tower, pixels))
    assert vision.tower.nbytes == tower.nbytes


def test_the_tokens_may_be_the_vocabularys_alone(tmp_path: Path) -> None:
    path = files(tmp_path, tiny_tower(), "", "", True)
    config = {name: value for name, value in CONFIG.items() if "token_index" not in name}
    vision, reason = load(path, config)
    assert vision is not None, reason
    assert vision.format == form()
    other, reason = load(path, config | {"boi_token_id": 20, "eoi_token_id": 21, "image_token_id": 22})
    assert other is not None, reason
    assert other.format.tokens(SIDE, SIDE) == [4, 20, 22, 22, 22, 22, 21, 4]


def test_the_probe_shows_a_small_image(tmp_path: Path) -> None:
    path = files(tmp_path, tiny_tower(), "", "", True)
    vision, reason = load(path, CONFIG | {"mm_tokens_per_image": 36})
    assert vision is not None, reason
    assert vision.format == replace(form(), rows=6)
    assert vision.small == replace(form(), rows=2, side=8)
    [image] = images(1, 8, 8)
    assert features(vision.tower, image[None]).shape == (1, vision.small.tokens(8, 8).count(12), SIZES.output)


@pytest.mark.parametrize("missing", ["\n\n", "<start_of_image>", "<end_of_image>", "<image_soft_token>"])
def test_a_tokenizer_without_the_images_tokens_is_told(tmp_path: Path, missing: str) -> None:
    vocabulary = {text: token for text, token in VOCABULARY.items() if text != missing}
    config = {name: value for name, value in CONFIG.items() if "token_index" not in name}
    vision, reason = load(files(tmp_path, tiny_tower(), "", "", True), config, vocabulary)
    assert vision is None
    shown = missing.replace("\n", "\\n")
    assert reason == f"its vision tower cannot be loaded: its tokenizer has no {shown}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mm_tokens_per_image": 5}, "its images of 24 pixels and patches of 4 do not make 5 features"),
        ({"mm_tokens_per_image": 16}, "do not make 16 features"),
        ({"vision_config": CONFIG["vision_config"] | {"image_size": 26}}, "its images of 26 pixels"),
        ({"vision_config": CONFIG["vision_config"] | {"image_size": 10**6}}, "its image_size is 1000000"),
        ({"vision_config": CONFIG["vision_config"] | {"image_size": 48}}, "the size of its images is"),
        ({"vision_config": CONFIG["vision_config"] | {"hidden_act": "gelu"}}, "its activation gelu is not"),
        ({"vision_config": CONFIG["vision_config"] | {"num_hidden_layers": 3}}, "Missing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    vision, why = load(files(tmp_path, tiny_tower(), "", "", True), CONFIG | change)
    assert vision is None
    assert reason in why


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": {"height": 24, "width": 48}}, "and its tower takes 24 x 24 pixels"),
        ({"size": {"longest_edge": 24}}, "and its tower takes 24 x 24 pixels"),
        ({"resample": 7}, "its resample is 7"),
        ({"image_std": [0.5, 0, 0.5]}, "its pixels cannot be normalized"),
    ],
)
def test_settings_of_images_that_do_not_fit_are_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = files(tmp_path, tiny_tower(), "", "", True)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | change))
    vision, why = load(path)
    assert vision is None
    assert reason in why


def test_a_limit_below_the_one_size_is_told(tmp_path: Path) -> None:
    path = files(tmp_path, tiny_tower(), "", "", True)
    assert load(path, most_pixels=576)[0] is not None
    vision, why = load(path, most_pixels=575)
    assert vision is None
    assert "its images have 576 pixels, and --max-image-pixels is 575" in why


def test_images_are_resized_as_the_files_say(tmp_path: Path) -> None:
    path = files(tmp_path, tiny_tower(), "", "", True)
    for stored, expected in ((2, "BILINEAR"), (3, "BICUBIC"), (None, "BILINEAR")):
        (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | {"resample": stored}))
        vision, reason = load(path)
        assert vision is not None, reason
        assert vision.format.resampling == expected
