"""Towers of mlx-vlm serve families that have none here. A stand-in with the same interface takes its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import Conv2d, Linear
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlxpaged.models.features import Feature
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision.families.pixtral.tower import STD as CLIP_STD
from mlxpaged.vision.tower import Vision
from tests.models.architectures import make_architecture
from tests.vision.tiny import images

WIDTH = 64
PLACEHOLDER = 9
SIDE = 8
"""Pixels of a tile of the Llama 4, which becomes 2 x 2 rows of features."""
LLAMA = {
    "vision_config": {"model_type": "llama4_vision_model", "image_size": SIDE, "patch_size": 2},
    "image_token_index": PLACEHOLDER,
}
GEMMA = {
    "vision_config": {"model_type": "gemma3n_vision"},
    "image_token_id": PLACEHOLDER,
    "vision_soft_tokens_per_image": 4,
}
TOKENS = {"<|image|>": 11, "<|image_start|>": 12, "<|image_end|>": 13, "<|tile_x_separator|>": 14}
TOKENS |= {"<|tile_y_separator|>": 15, "<start_of_image>": 16, "<end_of_image>": 17, "\n\n": 18}
TOKENS |= {"]<]start of image[>[": 19, "]<]end of image[>[": 20, "<|media_begin|>": 21, "<|media_content|>": 22}
TOKENS |= {"<|media_end|>": 23, "image": 24, "Ġ": 25, "x": 26} | {str(digit): 30 + digit for digit in range(10)}


class Config(SimpleNamespace):
    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


class Seeing(Module):
    """Puts features where the tokens are placeholders, as mlx-vlm's models do."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert isinstance(config.text_config, Config)
        self.config = config
        self.language_model = Linear(2**20, 2**20)  # of 4 TB, which are never evaluated

    def put(self, ids: mx.array, features: mx.array) -> Any:
        embedded = self.language_model.model.embed_tokens(ids)
        assert ids.tolist() == np.full(ids.shape, PLACEHOLDER).tolist()
        return SimpleNamespace(inputs_embeds=features.reshape(embedded.shape))


class Double(Module):
    """A block of a tower."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * x


class Llama4(Seeing):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision_model = {"embedding": Linear(3 * (SIDE // 2) ** 2, 24, bias=False)}
        self.layers = [Double(), Double()]
        self.multi_modal_projector = {"linear_1": Linear(24, WIDTH, bias=False)}

    def get_input_embeddings(self, ids: mx.array, pixel_values: mx.array) -> Any:
        half = SIDE // 2
        patches = pixel_values.reshape(-1, 3, 2, half, 2, half).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * half**2)
        state = self.vision_model["embedding"](patches)
        for layer in self.layers:
            state = layer(state)
        return self.put(ids, self.multi_modal_projector["linear_1"](state))


class Gemma3n(Seeing):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.audio_tower = Linear(2**20, 2**20)
        self.vision_tower = {"timm_model": {"blocks": [[{"conv_exp": Conv2d(3, 5, 3, stride=384, bias=False)}]]}}
        self.embed_vision = {"embedding_projection": Linear(5, WIDTH, bias=False)}

    def get_input_embeddings(self, ids: mx.array, pixel_values: mx.array) -> Any:
        convolve = self.vision_tower["timm_model"]["blocks"][0][0]["conv_exp"]
        return self.put(ids, self.embed_vision["embedding_projection"](convolve(pixel_values.transpose(0, 2, 3, 1))))


@dataclass(frozen=True)
class Patches:
    """How one of mlx-vlm's models takes the patches of images. grid: the name of the argument with their rows and
    columns. axes: the order of a patch's frames (t), rows (r), columns (c) and colours (k). frames: of a patch. part:
    where the weights are. tower: sizes. squares: patches come square by square. more: of config.json."""

    grid: str
    axes: str
    frames: int
    part: str
    tower: dict[str, Any]
    squares: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {"vision_config": self.tower, **self.more}


SIDES = {"patch_size": 4, "merge_size": 2, "spatial_merge_size": 2}
IMAGE_TOKEN = {"image_token_id": PLACEHOLDER}
PATCHES = {
    "kimi_k3": Patches("grid_thws", "tkrc", 1, "mm_projector", SIDES, more={"image_token_index": PLACEHOLDER}),
    "minimax_m3_vl": Patches(
        "image_grid_thw", "ktrc", 2, "patch_merge_mlp", SIDES | {"temporal_patch_size": 2}, True, IMAGE_TOKEN
    ),
    "muse_glimmer": Patches(
        "image_grid_thw", "tkrc", 3, "vision_projection", SIDES | {"patch_temporal": 3}, more=IMAGE_TOKEN
    ),
}


class SeeingPatches(Seeing):
    """Features of a square of patches are the sum of their projections."""

    patches: Patches

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self[self.patches.part] = {"linear": Linear(4 * 4 * 3 * self.patches.frames, WIDTH, bias=False)}

    def get_input_embeddings(self, ids: mx.array, pixel_values: mx.array, **grid: mx.array) -> Any:
        shapes: Any = grid.pop(self.patches.grid).tolist()
        [[_, rows, columns], *others] = shapes
        assert grid == {}
        assert all(each == [1, rows, columns] for each in others)
        projected = self[self.patches.part]["linear"](pixel_values.reshape(len(pixel_values), -1))
        if self.patches.squares:
            return self.put(ids, projected.reshape(-1, 4, WIDTH).sum(axis=1))
        grids = projected.reshape(len(ids), rows // 2, 2, columns // 2, 2, WIDTH)
        return self.put(ids, self.language_model.model.embed_norm(grids.sum(axis=(2, 4))))


@pytest.fixture(autouse=True)
def with_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {f"{part}Config": Config for part in ("Model", "Text", "Vision", "Audio")}
    for kind, model in MODELS.items():
        monkeypatch.setitem(sys.modules, f"mlx_vlm.models.{kind}", SimpleNamespace(Model=model, **configs))


MODELS: dict[str, type[Seeing]] = {
    "llama4": Llama4,
    "gemma3n": Gemma3n,
    **{name: type(name, (SeeingPatches,), {"patches": patches}) for name, patches in PATCHES.items()},
}

Make = Callable[..., tuple[ServedModel, dict[str, mx.array]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that makes a model's directory and loads it, with the tower's weights. prefix: of their names
    in the directory."""

    def load(files: ModelFiles, config: Any, vocabulary: Any, *more: Any) -> tuple[Vision | None, str]:
        return load_vision(files, config, lambda: vocabulary() | TOKENS, *more)

    monkeypatch.setattr("mlxpaged.models.loader.load_vision", load)

    def made(
        kind: str, more: dict[str, Any], images: dict[str, Any], prefix: str = "model."
    ) -> tuple[ServedModel, dict[str, mx.array]]:
        path = make_architecture(tmp_path / "m", kind)
        config = json.loads((path / "config.json").read_text())
        config = {"text_config": config} | config | more
        (path / "config.json").write_text(json.dumps(config))
        (path / "preprocessor_config.json").write_text(json.dumps(images))
        model = MODELS[kind](Config(text_config=Config()))
        del model["language_model"]
        model.pop("audio_tower", None)
        names: Any = tree_flatten(model.parameters())
        weights = {name: mx.random.normal(array.shape, key=mx.random.key(7)) for name, array in names}
        of_torch = {
            f"{prefix}{name}": mx.contiguous(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array
            for name, array in weights.items()
        }
        mx.save_safetensors(str(path / "model-tower.safetensors"), of_torch)
        return load_model(str(path)), weights

    return made


def features(vision: Vision, pixels: Any) -> Any:
    *_, found = vision.tower.encode(mx.array(pixels))
    return np.array(found)


def test_llama4_sees_tiles_and_the_whole_image(make: Make) -> None:
    served, weights = make("llama4", LLAMA, {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4})
    vision = served.vision
    assert vision is not None, served.missing[Feature.IMAGES]
    assert vision.tower.nbytes == sum(array.nbytes for array in weights.values())
    assert vision.format.tokens(8, 8) == [12, 11, 9, 9, 9, 9, 13]
    [pixels] = images(1, 12, 8)
    left, right = pixels[:, :8], np.concatenate([pixels[:, 8:], np.zeros((8, 4, 3), np.uint8)], axis=1)
    found = features(vision, np.stack([pixels, pixels[::-1]]))
    assert found.shape == (2, 12, WIDTH)
    projection = 4 * weights["multi_modal_projector.linear_1.weight"] @ weights["vision_model.embedding.weight"]
    for tile, rows in ((left, found[0, :4]), (right, found[0, 4:8])):
        colours = (tile / 255 - 0.5) / 0.5
        corners = [colours[i : i + 4, j : j + 4].transpose(2, 0, 1).reshape(-1) for i in (0, 4) for j in (0, 4)]
        assert rows == pytest.approx(np.array(corners) @ np.array(projection).T, abs=1e-3)
    grey = features(vision, np.full((1, 8, 12, 3), 90, np.uint8))[0]
    assert grey[8:] == pytest.approx(grey[:4], abs=1e-3)


def test_each_block_of_a_tower_is_a_part_of_the_work(make: Make) -> None:
    """Two images at once do not take each other's parts."""
    served, weights = make("llama4", LLAMA, {"size": {"height": SIDE, "width": SIDE}})
    vision = served.vision
    assert vision is not None, served.missing[Feature.IMAGES]
    both = images(2, SIDE, SIDE)
    works = [vision.tower.encode(mx.array(pixels[None])) for pixels in both]
    parts = [[np.array(part) for part in each] for each in zip(*works, strict=True)]
    assert len(parts) == 3
    projection = np.array(weights["multi_modal_projector.linear_1.weight"]).T
    for i, pixels in enumerate(both):
        once, twice, found = (part[i] for part in parts)
        assert twice == pytest.approx(2 * once)
        assert found[0] == pytest.approx(twice @ projection, abs=1e-3)
        assert found == pytest.approx(features(vision, pixels[None]), abs=1e-3)
    assert vision.tower.nbytes == sum(array.nbytes for array in weights.values())


def test_gemma3n_sees_features_that_its_text_model_multiplies(make: Make) -> None:
    served, weights = make("gemma3n", GEMMA, {"do_normalize": False})
    vision = served.vision
    assert vision is not None, served.missing[Feature.IMAGES]
    assert vision.format.size(30, 20) == (768, 768)
    assert vision.format.template_token == PLACEHOLDER
    assert vision.format.tokens(768, 768) == [18, 16, 9, 9, 9, 9, 17, 18]
    pixels = images(1, 768, 768)
    convolution = np.array(weights["vision_tower.timm_model.blocks.0.0.conv_exp.weight"]).reshape(5, -1)
    projection = np.array(weights["embed_vision.embedding_projection.weight"])
    corners = [pixels[0, i : i + 3, j : j + 3].reshape(-1) / 255 for i in (0, 384) for j in (0, 384)]
    wanted = np.array(corners) @ convolution.T @ projection.T / WIDTH**0.5
    assert features(vision, pixels)[0] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("kind", "prefix"), [*((kind, "") for kind in PATCHES), ("muse_glimmer", "model.")])
def test_models_that_are_told_a_grid_of_patches(make: Make, kind: str, prefix: str) -> None:
    patches = PATCHES[kind]
    served, weights = make(kind, patches.config, {"image_mean": [0.2, 0.4, 0.6], "min_pixels": 64}, prefix)
    vision = served.vision
    assert vision is not None, served.missing[Feature.IMAGES]
    assert vision.format.size(50, 30) == ((48, 32) if kind == "minimax_m3_vl" else (56, 32))
    around = {"minimax_m3_vl": [19, 9, 9, 20], "muse_glimmer": [12, 9, 9, 13]}
    of_kimi = [21, 24, 25, 31, 36, 26, 38, 22, 9, 9, 23]  # "image 16x8"
    assert vision.format.tokens(16, 8) == around.get(kind, of_kimi)
    pixels = images(2, 24, 16)
    found = features(vision, pixels)
    assert found.shape == (2, 6, WIDTH)
    mean, std = np.array([0.2, 0.4, 0.6]), np.array(CLIP_STD if kind == "minimax_m3_vl" else (0.5, 0.5, 0.5))
    colours = ((pixels / 255 - mean) / std).reshape(2, 2, 2, 4, 3, 2, 4, 3)  # y, square's y, row, x, square's x, column
    frames = np.stack([colours] * patches.frames, axis=-1)
    by_patch = np.einsum(f"nyirxjckt->nyxij{patches.axes}", frames).reshape(2, 6, 4, -1)
    wanted = (by_patch @ np.array(weights[f"{patches.part}.linear.weight"]).T).sum(axis=2)
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_model_that_needs_mlx_vlm_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_vlm.models.llama4")
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    served, _ = make("llama4", LLAMA, {"size": {"height": SIDE, "width": SIDE}})
    assert served.vision is None
    assert "`pip install --no-deps mlx-vlm` let this model see" in served.missing[Feature.IMAGES]


def test_images_of_another_size_are_told(make: Make) -> None:
    served, _ = make("gemma3n", GEMMA, {"size": {"height": 512, "width": 512}})
    assert served.vision is None
    assert "its tower takes 768 x 768 pixels" in served.missing[Feature.IMAGES]
