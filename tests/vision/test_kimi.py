"""The tower of Kimi-VL and Kimi K2.5 computes what its definition says, and its files are read in all layouts."""

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
from mlx.utils import tree_flatten

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.families.kimi.format import KimiFormat
from mlxpaged.vision.families.kimi.tower import KimiTower
from mlxpaged.vision.tower import Vision
from tests.vision.definitions import Array, exact_gelu, gelu_of_tanh, linear, mixed_heads, norm
from tests.vision.tiny import images
from tests.vision.tiny_kimi import (
    CONVOLUTION,
    IMAGES,
    MEDIA,
    SIZES,
    config_of,
    config_of_k2_5,
    files,
    stored_weights,
    stored_weights_of_k2_5,
    tiny_tower,
)


def features(tower: KimiTower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last.astype(mx.float32))


def cubic(distance: float) -> float:
    x = abs(distance)
    if x < 1:
        return 1.25 * x**3 - 2.25 * x**2 + 1
    return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def place(grid: Array, row: int, column: int, rows: int, columns: int) -> Array:
    """The embedding of a point between four by four places of the grid. Beyond its edges are the edges again."""
    y, x = (row + 0.5) * grid.shape[0] / rows - 0.5, (column + 0.5) * grid.shape[1] / columns - 0.5
    found = np.zeros(grid.shape[2])
    for i in range(math.floor(y) - 1, math.floor(y) + 3):
        for j in range(math.floor(x) - 1, math.floor(x) + 3):
            at = grid[min(max(i, 0), grid.shape[0] - 1), min(max(j, 0), grid.shape[1] - 1)]
            found += cubic(y - i) * cubic(x - j) * at
    return found


def turned(head: Array, row: int, column: int) -> Array:
    """Each pair of neighbours turns: the first by the column, the second by the row, and so on."""
    out = head.copy()
    for pair in range(len(head) // 2):
        angle = (row if pair % 2 else column) * 10000.0 ** (-4 * (pair // 2) / len(head))
        a, b = head[2 * pair], head[2 * pair + 1]
        out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def reference_features(tower: KimiTower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64, with one loop for each sum."""
    found: Any = tree_flatten(tower.parameters())
    weights: dict[str, Array] = {name: np.array(each.astype(mx.float32), np.float64) for name, each in found}
    sizes, side = tower.sizes, tower.sizes.patch
    of_tower = {name.removeprefix("vision_tower."): each for name, each in weights.items()}
    of_projector = {name.removeprefix("multi_modal_projector."): each for name, each in weights.items()}
    rows, columns = image.shape[0] // side, image.shape[1] // side
    places = [(row, column) for row in range(rows) for column in range(columns)]
    state = []
    for row, column in places:
        patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        colours = (patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)
        embedded = linear(colours.reshape(-1), of_tower, "patch_embed.proj")
        state.append(embedded + place(of_tower["patch_embed.pos_emb.weight"], row, column, rows, columns))
    for number in range(sizes.blocks):
        own = {name.removeprefix(f"encoder.blocks.{number}."): each for name, each in of_tower.items()}
        heads = []
        for at, x in zip(places, state, strict=True):
            q, k, v = linear(norm(x, own, "norm0", 1e-5), own, "wqkv").reshape(3, sizes.heads, -1)
            heads.append(np.array([[turned(head, *at) for head in q], [turned(head, *at) for head in k], v]))
        mixed = mixed_heads(heads, [(0, 0)] * len(heads), lambda one, other: True)  # at (0, 0), nothing turns again
        state = [x + linear(y.reshape(-1), own, "wo") for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            inner = gelu_of_tanh(linear(norm(x, own, "norm1", 1e-5), own, "mlp.fc0"))
            state[i] = x + linear(inner, own, "mlp.fc1")
    state = [norm(norm(x, of_tower, "encoder.final_layernorm", 1e-5), of_projector, "pre_norm", 1e-5) for x in state]
    out = []
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            x = np.concatenate([state[(row + i) * columns + column + j] for i in range(2) for j in range(2)])
            out.append(linear(exact_gelu(linear(x, of_projector, "linear_1")), of_projector, "linear_2"))
    return np.array(out)


@pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40), (24, 24)])
def test_features_are_those_of_the_definition(width: int, height: int) -> None:
    tower, [image] = tiny_tower(), images(1, width, height)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


def test_norms_of_small_values_are_those_of_the_definition() -> None:
    """Their epsilon counts then."""
    tower, [image] = tiny_tower(), images(1, 24, 16)
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    small = [(name, 0.003 * each) for name, each in weights.items() if "patch_embed" in name or "final" in name]
    tower.load_weights(small, strict=False)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=1e-3 * float(np.abs(wanted).max()))


def test_a_batch_has_the_features_of_each_image_alone() -> None:
    tower, several = tiny_tower(), images(3, 24, 16)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_images_of_a_batch_do_not_see_one_another() -> None:
    tower, several = tiny_tower(), images(3, 24, 16)
    before = features(tower, several)
    several[1] = 0
    after = features(tower, several)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])


def test_parts_of_an_encoding() -> None:
    assert len(list(tiny_tower().encode(mx.array(images(2, 24, 16))))) == 2 * SIZES.blocks + 1


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(), images(2, 40, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_weights_give_near_features_of_their_type(dtype: mx.Dtype) -> None:
    tower, pixels = tiny_tower(dtype=dtype), images(1, 24, 16)
    *_, last = tower.encode(mx.array(pixels))
    assert last.dtype == dtype
    wanted = reference_features(tower, pixels[0])
    assert features(tower, pixels)[0] == pytest.approx(wanted, abs=0.1 * float(np.abs(wanted).max()))


def load(path: Path, config: dict[str, Any], most_pixels: int = 10**6) -> tuple[Vision | None, str]:
    vocabulary = {"<|media_pad|>": 10}
    return load_vision(ModelFiles(path), config, lambda: vocabulary, lambda done, total: None, most_pixels=most_pixels)


@pytest.mark.parametrize("of_mlx_vlm", [False, True])
def test_a_checkpoint_gives_its_tower(tmp_path: Path, of_mlx_vlm: bool) -> None:
    tower = tiny_tower()
    weights = stored_weights(tower, of_mlx_vlm) | {"language_model.model.norm.weight": mx.ones(16)}
    vision, reason = load(files(tmp_path, weights), config_of())
    assert vision is not None, reason
    assert (vision.axes, vision.num_deep, vision.mutual) == (None, 0, "none")
    assert vision.format == KimiFormat(placeholder=9, side=8, merge=2, most=256)
    assert isinstance(vision.tower, KimiTower)
    assert np.array_equal(features(vision.tower, images(2, 24, 16)), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


@pytest.mark.parametrize("of_mlx_vlm", [False, True])
def test_a_checkpoint_of_kimi_k2_5_gives_its_tower(tmp_path: Path, of_mlx_vlm: bool) -> None:
    """That of one frame, which is Kimi-VL's: there is no embedding of time, and a mean over frames is the frame."""
    tower = tiny_tower()
    weights = stored_weights_of_k2_5(tower, of_mlx_vlm)
    assert {name.split(".")[0] for name in weights} == {"vision_tower", "mm_projector"}
    files(tmp_path, weights | {"language_model.model.norm.weight": mx.ones(16)})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(MEDIA))
    config = config_of_k2_5()
    if of_mlx_vlm:
        config["vision_config"] = config_of()["vision_config"]
    vision, reason = load(tmp_path, config)
    assert vision is not None, reason
    assert (vision.axes, vision.num_deep, vision.mutual) == (None, 0, "none")
    assert vision.format == KimiFormat(placeholder=9, side=8, merge=2, most=256, longest=100)
    assert np.array_equal(features(vision.tower, images(2, 24, 16)), features(tower, images(2, 24, 16)))  # type: ignore[arg-type]
    assert vision.tower.nbytes == tower.nbytes


def test_kimi_k2_5_without_settings_of_images(tmp_path: Path) -> None:
    files(tmp_path, stored_weights_of_k2_5(tiny_tower(), of_mlx_vlm=False))
    (tmp_path / "preprocessor_config.json").unlink()
    vision, reason = load(tmp_path, config_of_k2_5(), most_pixels=10**9)
    assert vision is not None, reason
    assert vision.format == KimiFormat(placeholder=9, side=8, merge=2, most=16_384, longest=512)


@pytest.mark.parametrize(
    ("seen", "media", "reason"),
    [
        ({"pos_emb_type": "learned"}, {}, "its pos_emb_type is learned"),
        ({"mm_projector_type": "patchmergerv2"}, {}, "its mm_projector_type is patchmergerv2"),
        ({"projector_ln_eps": 1e-6}, {}, "its projector_ln_eps is 1e-06"),
        ({"activation_func": "silu"}, {}, "its activation_func is silu"),
        ({"vt_num_hidden_layers": 3}, {}, "Missing"),
        ({"vt_hidden_size": 0}, {}, "its hidden_size is 0"),
        ({}, {"fixed_output_tokens": 64}, "its fixed_output_tokens are 64"),
        ({}, {"in_patch_limit": "many"}, "its in_patch_limit is many"),
        ({}, {"patch_limit_on_one_side": 0}, "its patch_limit_on_one_side is 0"),
    ],
)
def test_a_kimi_k2_5_that_does_not_fit_is_told(
    tmp_path: Path, seen: dict[str, Any], media: dict[str, Any], reason: str
) -> None:
    files(tmp_path, stored_weights_of_k2_5(tiny_tower(), of_mlx_vlm=False))
    changed = {"media_proc_cfg": MEDIA["media_proc_cfg"] | media}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changed))
    config = config_of_k2_5()
    config["vision_config"] |= seen
    vision, why = load(tmp_path, config)
    assert vision is None
    assert reason in why


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantized_layers_stay_quantized(tmp_path: Path, bits: int, mode: str) -> None:
    sizes = replace(SIZES, width=64, hidden=64, heads=2, output=64)
    tower = tiny_tower(sizes)

    def chosen(name: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and "patch_embed" not in name

    nn.quantize(tower, 32, bits, mode=mode, class_predicate=chosen)
    config = config_of(sizes) | {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    vision, reason = load(files(tmp_path, stored_weights(tower, of_mlx_vlm=True)), config)
    assert vision is not None, reason
    assert isinstance(vision.tower, KimiTower)
    assert np.array_equal(features(vision.tower, images(2, 24, 16)), features(tower, images(2, 24, 16)))
    assert vision.tower.nbytes == tower.nbytes


def test_the_placeholder_follows_the_files(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(), of_mlx_vlm=False))
    config = config_of()
    del config["media_placeholder_token_id"]
    for more, placeholder in (({}, 10), ({"image_token_index": 7}, 7)):
        vision, reason = load(tmp_path, config | more)
        assert vision is not None, reason
        assert vision.format.placeholder == placeholder


def test_without_settings_of_images_those_of_the_models_are_taken(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(), of_mlx_vlm=False))
    (tmp_path / "preprocessor_config.json").unlink()
    vision, reason = load(tmp_path, config_of())
    assert vision is not None, reason
    assert vision.format == KimiFormat(placeholder=9, side=8, merge=2, most=4096)
    assert isinstance(vision.tower, KimiTower)
    assert vision.tower.sizes.mean == vision.tower.sizes.std == (0.5, 0.5, 0.5)


def test_an_image_has_no_more_pixels_than_the_server_is_told(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(), of_mlx_vlm=False))
    vision, reason = load(tmp_path, config_of(), most_pixels=1024)
    assert vision is not None, reason
    assert vision.format.size(640, 640) == (32, 32)


def seen(**change: Any) -> dict[str, Any]:
    return {"vision_config": config_of()["vision_config"] | change}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (seen(merge_kernel_size=[2, 1]), "its merge_kernel_size is [2, 1]"),
        (seen(merge_kernel_size=2), "its merge_kernel_size is 2"),
        (seen(merge_kernel_size=[0, 0]), "is 0"),
        (seen(num_attention_heads=4), "its 4 heads of 24 elements cannot turn with rows and columns"),
        (seen(num_hidden_layers=3), "Missing"),
        (seen(init_pos_emb_width=5), "pos_emb.weight"),
        ({"text_config": {}}, "its hidden_size is None"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    files(tmp_path, stored_weights(tiny_tower(), of_mlx_vlm=False))
    vision, why = load(tmp_path, config_of() | change)
    assert vision is None
    assert reason in why


def test_limits_that_are_none_are_told(tmp_path: Path) -> None:
    files(tmp_path, stored_weights(tiny_tower(), of_mlx_vlm=False))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGES | {"in_token_limit": 0}))
    assert load(tmp_path, config_of()) == (None, "its vision tower cannot be loaded: its in_token_limit is 0")


def test_a_convolution_of_another_size_is_named(tmp_path: Path) -> None:
    weights = stored_weights(tiny_tower(), of_mlx_vlm=False) | {CONVOLUTION: mx.zeros((24, 3, 5, 5))}
    vision, reason = load(files(tmp_path, weights), config_of())
    assert vision is None
    assert CONVOLUTION in reason
