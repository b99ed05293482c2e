"""The tower of Qwen2-VL, Qwen3-VL and Qwen3.5 computes what its definition says. Its files are read in all layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.families.qwen.format import QwenFormat
from mlxpaged.vision.families.qwen.tower import QwenSizes, QwenTower
from mlxpaged.vision.positions import Axes
from tests.vision.definitions import Array, exact_gelu, gelu_of_tanh, linear, mixed_heads, norm, quick_gelu
from tests.vision.tiny import images
from tests.vision.tiny_qwen import DEEP, OLD, PLAIN, config_of, files, old_config, tiny_tower

ALL = pytest.mark.parametrize("sizes", [DEEP, PLAIN, OLD], ids=["deep", "plain", "old"])


def features(tower: QwenTower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last)


def place(weights: dict[str, Array], sizes: QwenSizes, row: int, column: int, rows: int, columns: int) -> Array:
    """The embedding of a point between four places of the grid."""
    if sizes.places is None:
        return np.zeros(sizes.width)
    grid = weights["pos_embed.weight"].reshape(sizes.places, sizes.places, -1)
    y, x = (at * (sizes.places - 1) / (count - 1) for at, count in ((row, rows), (column, columns)))
    found = np.zeros(sizes.width)
    for i in range(sizes.places):
        for j in range(sizes.places):
            found += max(0.0, 1 - abs(y - i)) * max(0.0, 1 - abs(x - j)) * grid[i, j]
    return found


def merged(state: list[Array], weights: dict[str, Array], name: str, norms_squares: bool) -> list[Array]:
    out = []
    for i in range(0, len(state), 4):
        square = state[i : i + 4]
        if not norms_squares:
            square = [norm(x, weights, f"{name}.norm") for x in square]
        x = np.concatenate(square)
        if norms_squares:
            x = norm(x, weights, f"{name}.norm")
        out.append(linear(exact_gelu(linear(x, weights, f"{name}.linear_fc1")), weights, f"{name}.linear_fc2"))
    return out


def reference_features(tower: QwenTower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64, with one loop for each sum."""
    found: Any = tree_flatten(tower.parameters())
    weights: dict[str, Array] = {name: np.array(weight, np.float64) for name, weight in found}
    sizes, side = tower.sizes, tower.sizes.patch
    rows, columns = image.shape[0] // side, image.shape[1] // side
    places = [
        (row + i, column + j)
        for row in range(0, rows, 2)
        for column in range(0, columns, 2)
        for i in range(2)
        for j in range(2)
    ]
    state = []
    for row, column in places:
        patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        colours = (patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)
        embedded = weights["patch_embed.proj.weight"] @ colours.reshape(-1) + weights.get("patch_embed.proj.bias", 0)
        state.append(embedded + place(weights, sizes, row, column, rows, columns))
    deep = []
    for number in range(sizes.blocks):
        own = {name.removeprefix(f"blocks.{number}."): w for name, w in weights.items()}
        heads = [linear(norm(x, own, "norm1"), own, "attn.qkv").reshape(3, sizes.heads, -1) for x in state]
        mixed = mixed_heads(heads, places, lambda one, other: True)
        state = [x + linear(y.reshape(-1), own, "attn.proj") for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            inner = linear(norm(x, own, "norm2"), own, "mlp.linear_fc1")
            inner = quick_gelu(inner) if sizes.activation == "quick_gelu" else gelu_of_tanh(inner)
            state[i] = x + linear(inner, own, "mlp.linear_fc2")
        if number in sizes.deep:
            name = f"deepstack_merger_list.{sizes.deep.index(number)}"
            deep.append(merged(state, weights, name, norms_squares=True))
    out = merged(state, weights, "merger", norms_squares=False)
    return np.array(out) if not deep else np.array([out, *deep]).swapaxes(0, 1)


@ALL
@pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40)])
def test_features_are_those_of_the_definition(sizes: QwenSizes, width: int, height: int) -> None:
    tower, [image] = tiny_tower(sizes), images(1, width, height)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=5e-5 * float(np.abs(wanted).max()))


@ALL
def test_a_batch_has_the_features_of_each_image_alone(sizes: QwenSizes) -> None:
    tower, several = tiny_tower(sizes), images(3, 24, 16)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_parts_of_an_encoding() -> None:
    tower, pixels = tiny_tower(DEEP), images(2, 24, 16)
    assert len(list(tower.encode(mx.array(pixels)))) == 2 * DEEP.blocks + len(DEEP.deep) + 1


@pytest.mark.parametrize(
    ("size", "of_qwen3", "of_qwen2"),
    [
        ((10, 7), (320, 224), (96, 64)),
        ((32, 32), (256, 256), (64, 64)),
        ((48, 80), (224, 352), (64, 64)),
        ((640, 480), (640, 480), (640, 480)),
        ((1000, 333), (992, 320), (992, 320)),
        ((3000, 2000), (3008, 1984), (1216, 800)),
        ((1920, 1080), (1920, 1088), (1312, 736)),
        ((7680, 4320), (5440, 3072), (1312, 736)),
        ((50, 2000), (64, 1984), (64, 1984)),
        ((33, 31), (288, 256), (64, 64)),
        ((8, 1500), (32, 3520), (32, 768)),
    ],
)
def test_sizes_are_those_of_transformers(
    size: tuple[int, int], of_qwen3: tuple[int, int], of_qwen2: tuple[int, int]
) -> None:
    """Values of smart_resize of transformers 5.24, with the limits of Qwen3-VL and of Qwen2-VL."""
    for limits, expected in (((65_536, 16_777_216), of_qwen3), ((3136, 1_003_520), of_qwen2)):
        found = QwenFormat(placeholder=9, side=32, least=limits[0], most=limits[1])
        assert found.size(*size) == expected
        assert found.size(*expected) == expected
        assert found.tokens(*expected) == [9] * (expected[0] // 32 * expected[1] // 32)
        assert found.grid(*expected) == (expected[1] // 32, expected[0] // 32)


@pytest.mark.parametrize(("prefix", "of_torch"), [("visual.", True), ("model.visual.", True), ("vision_tower.", False)])
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3_vl", DEEP), ("qwen3_5_moe", PLAIN)])
def test_a_checkpoint_gives_its_tower(tmp_path: Path, kind: str, sizes: QwenSizes, prefix: str, of_torch: bool) -> None:
    path = files(tmp_path, sizes, prefix, of_torch)
    vision, reason = load_vision(ModelFiles(path), config_of(sizes, kind), dict, lambda done, total: None)
    assert vision is not None, reason
    assert (vision.axes, vision.num_deep) == (Axes((2, 1, 1), True), len(sizes.deep))
    assert vision.format.size(80, 20) == (80, 16)
    assert vision.format.tokens(16, 8) == [9, 9]
    assert isinstance(vision.tower, QwenTower)
    pixels = images(1, 24, 16)
    wanted = features(tiny_tower(sizes), pixels)
    assert features(vision.tower, pixels) == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(("prefix", "of_torch"), [("visual.", True), ("model.visual.", True), ("vision_tower.", False)])
def test_a_checkpoint_of_qwen2_gives_its_tower(tmp_path: Path, prefix: str, of_torch: bool) -> None:
    """The norm of the merger and the feed-forward layers have other names there."""
    path = files(tmp_path, OLD, prefix, of_torch)
    vision, reason = load_vision(ModelFiles(path), old_config(), dict, lambda done, total: None)
    assert vision is not None, reason
    assert (vision.axes, vision.num_deep) == (Axes((2, 1, 1), False), 0)
    assert vision.format.tokens(16, 8) == [9, 9]
    assert isinstance(vision.tower, QwenTower)
    pixels = images(1, 24, 16)
    wanted = features(tiny_tower(OLD), pixels)
    assert features(vision.tower, pixels) == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mlp_ratio": 65}, "its mlp_ratio is 65"),
        ({"embed_dim": 0}, "its embed_dim is 0"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
    ],
)
def test_a_configuration_of_qwen2_that_does_not_fit_is_told(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = files(tmp_path, OLD, "visual.", of_torch=True)
    config = old_config()
    config["vision_config"] |= change
    vision, why = load_vision(ModelFiles(path), config, dict, lambda done, total: None)
    assert vision is None
    assert reason in why


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text_config": {"hidden_size": 16}}, "its mrope_section is None"),
        ({"vision_config": {"hidden_size": 24}}, "num_position_embeddings"),
        ({"vision_config": config_of(DEEP, "qwen3_vl")["vision_config"] | {"depth": 4}}, "Missing"),
        *(
            (
                {"vision_config": config_of(DEEP, "qwen3_vl")["vision_config"] | {"deepstack_visual_indexes": deep}},
                "its deepstack_visual_indexes are",
            )
            for deep in ([0] * 100_000, [2, 0], [0, 3], [-1], ["0"], {"0": 2})
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = files(tmp_path, DEEP, "visual.", of_torch=True)
    vision, why = load_vision(ModelFiles(path), config_of(DEEP, "qwen3_vl") | change, dict, lambda done, total: None)
    assert vision is None
    assert reason in why


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(DEEP), images(2, 40, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts
