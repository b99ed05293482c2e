"""The tower of LFM2-VL computes what its definition says, and its files are read with the names of all libraries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.families.lfm2.format import Lfm2Format, Tiles
from mlxpaged.vision.families.lfm2.tower import Lfm2Sizes, Lfm2Tower
from mlxpaged.vision.interpolation import resized_part
from mlxpaged.vision.tower import Vision
from tests.vision.definitions import Array, exact_gelu, gelu_of_tanh, linear, mixed_heads, norm
from tests.vision.tiny import images
from tests.vision.tiny_lfm2 import IMAGES, NORMED, PLAIN, TILES, config_of, files, stored_weights, tiny_tower

BOTH = pytest.mark.parametrize("sizes", [NORMED, PLAIN], ids=["normed", "plain"])
FORM = Lfm2Format(placeholder=9, around=(11, 12), side=8, least=4, most=64)
VOCABULARY = {"<image>": 10, "<|image_start|>": 11, "<|image_end|>": 12, "<|img_thumbnail|>": 13}
NAMES = {(row, column): 100 + 10 * row + column for row in range(10) for column in range(10)}
VOCABULARY |= {f"<|img_row_{row + 1}_col_{column + 1}|>": token for (row, column), token in NAMES.items()}
TILED = replace(
    FORM, least=1, most=4, tiles=Tiles(side=16, least=2, most=6, tolerance=1.0, pixels=10**6, thumbnail=True)
)


def features(tower: Lfm2Tower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last.astype(mx.float32))


def near(places: int, position: int, count: int) -> Array:
    """How much each of the grid's places counts for a position: less with its distance, and nothing from a place away,
    or from as many places as a position of the image covers."""
    reach = max(1.0, places / count)
    centre = (position + 0.5) * places / count
    found = np.array([max(0.0, 1 - abs(place + 0.5 - centre) / reach) for place in range(places)])
    return found / found.sum()


def reference_features(tower: Lfm2Tower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64, with one loop for each sum."""
    found: Any = tree_flatten(tower.parameters())
    weights: dict[str, Array] = {name: np.array(each.astype(mx.float32), np.float64) for name, each in found}
    sizes, side = tower.sizes, tower.sizes.patch
    of_tower = {name.removeprefix("vision_tower."): each for name, each in weights.items()}
    of_projector = {name.removeprefix("multi_modal_projector."): each for name, each in weights.items()}
    rows, columns = image.shape[0] // side, image.shape[1] // side
    grid = of_tower["embeddings.position_embedding.weight"].reshape(sizes.places, sizes.places, -1)
    state = []
    for row in range(rows):
        for column in range(columns):
            patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
            colours = (patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)
            x = linear(colours.reshape(-1), of_tower, "embeddings.patch_embedding")
            for i, down in enumerate(near(sizes.places, row, rows)):
                for j, across in enumerate(near(sizes.places, column, columns)):
                    x = x + down * across * grid[i, j]
            state.append(x)
    for number in range(sizes.blocks):
        own = {name.removeprefix(f"encoder.layers.{number}."): each for name, each in of_tower.items()}
        normed = [norm(x, own, "layer_norm1", sizes.eps) for x in state]
        heads = [
            np.array([linear(x, own, f"self_attn.{name}_proj").reshape(sizes.heads, -1) for name in "qkv"])
            for x in normed
        ]
        mixed = mixed_heads(heads, [(0, 0)] * len(heads), lambda one, other: True)  # at (0, 0), nothing turns
        state = [x + linear(y.reshape(-1), own, "self_attn.out_proj") for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            inner = gelu_of_tanh(linear(norm(x, own, "layer_norm2", sizes.eps), own, "mlp.fc1"))
            state[i] = x + linear(inner, own, "mlp.fc2")
    state = [norm(x, of_tower, "post_layernorm", sizes.eps) for x in state]
    out = []
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            x = np.concatenate([state[(row + i) * columns + column + j] for i in range(2) for j in range(2)])
            if sizes.norm:
                x = norm(x, of_projector, "layer_norm", 1e-5)
            out.append(linear(exact_gelu(linear(x, of_projector, "linear_1")), of_projector, "linear_2"))
    return np.array(out)


@BOTH
@pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40)])
def test_features_are_those_of_the_definition(sizes: Lfm2Sizes, width: int, height: int) -> None:
    tower, [image] = tiny_tower(sizes), images(1, width, height)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


def test_the_projectors_norm_of_small_values_is_that_of_the_definition() -> None:
    """Its epsilon counts then."""
    tower, [image] = tiny_tower(NORMED), images(1, 24, 16)
    last = tower.vision_tower.post_layernorm
    last.update(tree_map(lambda weight: 0.003 * weight, last.parameters()))
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=1e-3 * float(np.abs(wanted).max()))


def test_a_batch_has_the_features_of_each_image_alone() -> None:
    tower, several = tiny_tower(NORMED), images(3, 24, 16)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_images_of_a_batch_do_not_see_one_another() -> None:
    tower, several = tiny_tower(NORMED), images(3, 24, 16)
    before = features(tower, several)
    several[1] = 0
    after = features(tower, several)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])


def test_parts_of_an_encoding() -> None:
    assert len(list(tiny_tower(NORMED).encode(mx.array(images(2, 24, 16))))) == 2 * NORMED.blocks + 1


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(NORMED), images(2, 40, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_weights_give_near_features_of_their_type(dtype: mx.Dtype) -> None:
    tower, pixels = tiny_tower(NORMED, dtype), images(1, 24, 16)
    *_, last = tower.encode(mx.array(pixels))
    assert last.dtype == dtype
    wanted = reference_features(tower, pixels[0])
    assert features(tower, pixels)[0] == pytest.approx(wanted, abs=0.1 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("thumbnail", [False, True])
@pytest.mark.parametrize(("width", "height", "grid"), [(40, 24, (2, 3)), (100, 20, (1, 5)), (15, 21, (3, 2))])
def test_an_image_is_split_into_tiles_before_its_thumbnail(
    width: int, height: int, grid: tuple[int, int], thumbnail: bool
) -> None:
    """Each is encoded as an image of its own, of pixels that Pillow would make from the whole."""
    assert TILED.tiles is not None
    form = replace(TILED, tiles=replace(TILED.tiles, thumbnail=thumbnail))
    tower, several = tiny_tower(NORMED), images(2, width, height)
    split = Lfm2Tower(NORMED, form)
    split.update(tower.parameters())
    assert form.size(width, height) == (width, height)
    assert form.split(width, height) == grid
    below, right = 16 * grid[0], 16 * grid[1]
    whole = np.array(resized_part(mx.array(several), below, right, slice(0, below), slice(0, right)))
    wanted = [
        features(tower, whole[:, top : top + 16, left : left + 16])
        for top in range(0, below, 16)
        for left in range(0, right, 16)
    ]
    if thumbnail:
        right, below = form.whole_size(width, height)
        small = resized_part(mx.array(several), below, right, slice(0, below), slice(0, right))
        wanted.append(features(tower, np.array(small)))
    joined = np.concatenate(wanted, axis=1)
    found = features(split, several)
    assert found.shape[1] == form.tokens(width, height).count(form.placeholder)
    assert found == pytest.approx(joined, abs=1e-5 * float(np.abs(joined).max()))


def test_a_part_of_a_split_image_is_a_part_of_a_tile() -> None:
    tower = Lfm2Tower(NORMED, TILED)
    num_parts = len(list(tower.encode(mx.array(images(1, 40, 24)))))
    assert num_parts == (6 + 1) * (1 + 2 * NORMED.blocks + 1) + 1


def load(path: Path, config: dict[str, Any], most_pixels: int = 10**6) -> tuple[Vision | None, str]:
    return load_vision(ModelFiles(path), config, lambda: VOCABULARY, lambda done, total: None, most_pixels=most_pixels)


@BOTH
@pytest.mark.parametrize("library", ["4", "5", "mlx-vlm"])
@pytest.mark.parametrize("kind", ["lfm2-vl", "lfm2_vl"])
def test_a_checkpoint_gives_its_tower(tmp_path: Path, kind: str, library: str, sizes: Lfm2Sizes) -> None:
    tower = tiny_tower(sizes)
    files(tmp_path, stored_weights(tower, library) | {"model.language_model.embed_tokens.weight": mx.ones((4, 4))})
    vision, reason = load(tmp_path, config_of(sizes, kind))
    assert vision is not None, reason
    assert (vision.axes, vision.num_deep, vision.mutual) == (None, 0, "none")
    assert vision.format == FORM
    assert vision.small == replace(FORM, least=1)
    assert isinstance(vision.tower, Lfm2Tower)
    assert np.array_equal(features(vision.tower, images(2, 24, 16)), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


def test_weights_that_a_tower_does_not_use_are_left_out(tmp_path: Path) -> None:
    """Some checkpoints have the projector's norm although their configuration turns it off, or SigLIP's own head."""
    tower = tiny_tower(PLAIN)
    unused = {
        "vision_tower.vision_model.head.probe": mx.ones((1, 24)),
        "vision_tower.embeddings.position_ids": mx.arange(25)[None],
        "multi_modal_projector.layer_norm.weight": mx.ones(96),
        "multi_modal_projector.layer_norm.bias": mx.ones(96),
    }
    vision, reason = load(files(tmp_path, stored_weights(tower, "mlx-vlm") | unused), config_of(PLAIN))
    assert vision is not None, reason
    assert isinstance(vision.tower, Lfm2Tower)
    assert np.array_equal(features(vision.tower, images(1, 24, 16)), features(tower, images(1, 24, 16)))


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantized_layers_stay_quantized(tmp_path: Path, bits: int, mode: str) -> None:
    """All of them are here, the embeddings of the places too, but those of the patches, which are too short."""
    sizes = replace(NORMED, width=64, hidden=64, heads=2, projector=64)
    tower = tiny_tower(sizes)

    def chosen(name: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and "patch_embedding" not in name

    nn.quantize(tower, 32, bits, mode=mode, class_predicate=chosen)
    config = config_of(sizes) | {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    vision, reason = load(files(tmp_path, stored_weights(tower, "mlx-vlm")), config)
    assert vision is not None, reason
    assert isinstance(vision.tower, Lfm2Tower)
    assert np.array_equal(features(vision.tower, images(2, 24, 16)), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


def test_a_quantized_embedding_of_patches(tmp_path: Path) -> None:
    """A patch of the models has 768 values, so mlx-vlm may quantize this layer too."""
    sizes = replace(NORMED, patch=8)
    tower = tiny_tower(sizes)
    nn.quantize(tower, 32, 8, class_predicate=lambda name, module: name.endswith("patch_embedding"))
    vision, reason = load(files(tmp_path, stored_weights(tower, "mlx-vlm")), config_of(sizes))
    assert vision is not None, reason
    assert isinstance(vision.tower, Lfm2Tower)
    pixels = images(1, 48, 32)
    wanted = features(tiny_tower(sizes), pixels)
    assert features(vision.tower, pixels) == pytest.approx(wanted, abs=0.05 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("more", "prompts", "expected"),
    [
        ({}, {}, FORM),
        ({"use_image_special_tokens": False}, {}, replace(FORM, around=None)),
        ({}, {"use_image_special_tokens": False}, replace(FORM, around=None)),
        ({"image_token_id": None, "image_token_index": 7}, {}, replace(FORM, placeholder=7)),
        ({"image_token_id": None}, {}, replace(FORM, placeholder=10)),
        ({"max_image_tokens": 32}, {}, FORM),
    ],
)
def test_the_format_follows_the_files(
    tmp_path: Path, more: dict[str, Any], prompts: dict[str, Any], expected: Lfm2Format
) -> None:
    files(tmp_path, stored_weights(tiny_tower(NORMED), "5"))
    (tmp_path / "processor_config.json").write_text(json.dumps(prompts))
    config = {name: value for name, value in (config_of(NORMED) | more).items() if value is not None}
    vision, reason = load(tmp_path, config)
    assert vision is not None, reason
    assert vision.format == expected


def test_limits_may_be_in_the_models_configuration_or_nowhere(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(NORMED), "5"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": IMAGES["image_mean"]}))
    for more, limits in (({}, (64, 256)), ({"min_image_tokens": 2, "max_image_tokens": 32}, (2, 32))):
        vision, reason = load(tmp_path, config_of(NORMED) | more)
        assert vision is not None, reason
        form: Any = vision.format
        assert (form.least, form.most) == limits
        assert (form.tiles.side, form.tiles.least, form.tiles.most, form.tiles.tolerance) == (512, 2, 4, 2.0)


def with_images(path: Path, **more: Any) -> Path:
    """The files of a model with these settings of images."""
    files(path, stored_weights(tiny_tower(NORMED), "5"))
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES | TILES | more))
    return path


def test_tiles_follow_the_files(tmp_path: Path) -> None:
    vision, reason = load(with_images(tmp_path), config_of(NORMED) | {"max_tiles": 6, "max_pixels_tolerance": 1})
    assert vision is not None, reason
    names = {each: token for each, token in NAMES.items() if (each[0] + 1) * (each[1] + 1) <= 6}
    assert TILED.tiles is not None
    assert vision.format == replace(TILED, tiles=replace(TILED.tiles, names=names, thumbnail_name=13))
    pixels = images(1, 40, 24)
    assert np.array_equal(
        features(vision.tower, pixels)[0].shape, (vision.format.tokens(40, 24).count(9), NORMED.output)
    )


def test_tiles_without_names_or_thumbnail(tmp_path: Path) -> None:
    path = with_images(tmp_path, use_thumbnail=False)
    vision, reason = load(path, config_of(NORMED) | {"use_image_special_tokens": False})
    assert vision is not None, reason
    assert vision.format.tokens(40, 24) == [9] * (4 * vision.format.grid(40, 24)[0] // 4)
    assert 9 in vision.format.tokens(40, 24)


def test_the_server_limits_the_tiles(tmp_path: Path) -> None:
    """To those that cover the pixels of the largest image."""
    with_images(tmp_path)
    for most_pixels, most in ((1300, 6), (513, 3), (512, 2), (256, None)):
        vision, reason = load(tmp_path, config_of(NORMED), most_pixels)
        assert vision is not None, reason
        tiles = vision.format.tiles  # type: ignore[attr-defined]
        assert most == (None if tiles is None else tiles.most)
        assert math.prod(vision.format.size(900, 700)) <= most_pixels


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_size": 20}, "its tiles of 20 pixels are not made of parts of 8"),
        ({"tile_size": 2**13}, "its tile_size is 8192"),
        ({"max_tiles": 0}, "its max_tiles is 0"),
        ({"max_tiles": 1000}, "its max_tiles is 1000"),
        ({"max_pixels_tolerance": 0.5}, "its max_pixels_tolerance is 0.5"),
        ({"max_pixels_tolerance": "no"}, "its max_pixels_tolerance is no"),
        ({"resample": 3}, "its tiles are not made with the bilinear filter"),
    ],
)
def test_tiles_that_do_not_fit_are_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    vision, why = load(with_images(tmp_path, **change), config_of(NORMED))
    assert vision is None
    assert reason in why


@pytest.mark.parametrize("missing", ["<|img_row_2_col_5|>", "<|img_thumbnail|>"])
def test_a_vocabulary_without_the_tokens_of_tiles_is_told(tmp_path: Path, missing: str) -> None:
    vocabulary = {text: token for text, token in VOCABULARY.items() if text != missing}
    with_images(tmp_path)
    vision, reason = load_vision(ModelFiles(tmp_path), config_of(NORMED), lambda: vocabulary, lambda done, total: None)
    assert vision is None
    assert reason == f"its vision tower cannot be loaded: its tokenizer has no {missing}"


def test_an_image_has_no_more_pixels_than_the_server_is_told(tmp_path: Path) -> None:
    vision, reason = load(files(tmp_path, stored_weights(tiny_tower(NORMED), "5")), config_of(NORMED), most_pixels=1024)
    assert vision is not None, reason
    assert vision.format.size(640, 640) == (32, 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vision_feature_layer": -2}, "its features come from layer -2 instead of the last"),
        ({"projector_hidden_act": "silu"}, "its projector_hidden_act is silu"),
        ({"vision_config": {"model_type": "lfm2_vl", "hidden_act": "gelu"}}, "its hidden_act is gelu"),
        ({"vision_config": {"model_type": "lfm2_vl", "num_patches": 24}}, "24 position embeddings are not those of a"),
        ({"vision_config": {"model_type": "lfm2_vl"} | {"patch_size": [16, 16]}}, r"its patch_size is [16, 16]"),
        ({"downsample_factor": 0}, "its downsample_factor is 0"),
        ({"text_config": {}}, "its hidden_size is None"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    files(tmp_path, stored_weights(tiny_tower(NORMED), "5"))
    vision, why = load(tmp_path, config_of(NORMED) | change)
    assert vision is None
    assert reason in why


@pytest.mark.parametrize("most", [0, "many", 2**21])
def test_limits_that_are_none_are_told(tmp_path: Path, most: Any) -> None:
    files(tmp_path, stored_weights(tiny_tower(NORMED), "5"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGES | {"max_image_tokens": most}))
    assert load(tmp_path, config_of(NORMED)) == (
        None,
        f"its vision tower cannot be loaded: its max_image_tokens is {most}",
    )


def test_a_vocabulary_without_the_tokens_around_an_image_is_told(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(NORMED), "5"))
    vision, reason = load_vision(ModelFiles(tmp_path), config_of(NORMED), lambda: {"<image>": 3}, lambda *_: None)
    assert vision is None
    assert reason == "its vision tower cannot be loaded: its tokenizer has no <|image_start|>"
