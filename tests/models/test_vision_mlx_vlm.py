"""Towers of mlx-vlm serve families that have none here. A stand-in with the same interface takes its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn import Conv2d, Linear
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision import load_vision
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


class Llama4(Seeing):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision_model = {"embedding": Linear(3 * (SIDE // 2) ** 2, 24, bias=False)}
        self.multi_modal_projector = {"linear_1": Linear(24, WIDTH, bias=False)}

    def get_input_embeddings(self, ids: mx.array, pixel_values: mx.array) -> Any:
        half = SIDE // 2
        patches = pixel_values.reshape(-1, 3, 2, half, 2, half).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * half**2)
        return self.put(ids, self.multi_modal_projector["linear_1"](self.vision_model["embedding"](patches)))


class Gemma3n(Seeing):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.audio_tower = Linear(2**20, 2**20)
        self.vision_tower = {"timm_model": {"blocks": [[{"conv_exp": Conv2d(3, 5, 3, stride=384, bias=False)}]]}}
        self.embed_vision = {"embedding_projection": Linear(5, WIDTH, bias=False)}

    def get_input_embeddings(self, ids: mx.array, pixel_values: mx.array) -> Any:
        convolve = self.vision_tower["timm_model"]["blocks"][0][0]["conv_exp"]
        return self.put(ids, self.embed_vision["embedding_projection"](convolve(pixel_values.transpose(0, 2, 3, 1))))


@pytest.fixture(autouse=True)
def with_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {f"{part}Config": Config for part in ("Model", "Text", "Vision", "Audio")}
    for kind, model in (("llama4", Llama4), ("gemma3n", Gemma3n)):
        monkeypatch.setitem(sys.modules, f"mlx_vlm.models.{kind}", SimpleNamespace(Model=model, **configs))


Make = Callable[..., tuple[ServedModel, dict[str, mx.array]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that makes a model's directory and loads it, with the tower's weights."""

    def load(files: ModelFiles, config: Any, vocabulary: Any, *more: Any) -> tuple[Vision | None, str]:
        return load_vision(files, config, lambda: vocabulary() | TOKENS, *more)

    monkeypatch.setattr("mlxpaged.models.loader.load_vision", load)

    def made(kind: str, more: dict[str, Any], images: dict[str, Any]) -> tuple[ServedModel, dict[str, mx.array]]:
        path = make_architecture(tmp_path / "m", kind)
        config = json.loads((path / "config.json").read_text()) | more
        (path / "config.json").write_text(json.dumps(config))
        (path / "preprocessor_config.json").write_text(json.dumps(images))
        model = (Llama4 if kind == "llama4" else Gemma3n)(Config(text_config=Config()))
        del model["language_model"]
        model.pop("audio_tower", None)
        names: Any = tree_flatten(model.parameters())
        weights = {name: mx.random.normal(array.shape, key=mx.random.key(7)) for name, array in names}
        of_torch = {
            f"model.{name}": mx.contiguous(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array
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
    assert vision is not None, served.no_vision_because
    assert vision.tower.nbytes == sum(array.nbytes for array in weights.values())
    assert vision.format.tokens(8, 8) == [12, 11, 9, 9, 9, 9, 13]
    [pixels] = images(1, 12, 8)
    left, right = pixels[:, :8], np.concatenate([pixels[:, 8:], np.zeros((8, 4, 3), np.uint8)], axis=1)
    found = features(vision, np.stack([pixels, pixels[::-1]]))
    assert found.shape == (2, 12, WIDTH)
    projection = weights["multi_modal_projector.linear_1.weight"] @ weights["vision_model.embedding.weight"]
    for tile, rows in ((left, found[0, :4]), (right, found[0, 4:8])):
        colours = (tile / 255 - 0.5) / 0.5
        corners = [colours[i : i + 4, j : j + 4].transpose(2, 0, 1).reshape(-1) for i in (0, 4) for j in (0, 4)]
        assert rows == pytest.approx(np.array(corners) @ np.array(projection).T, abs=1e-3)
    grey = features(vision, np.full((1, 8, 12, 3), 90, np.uint8))[0]
    assert grey[8:] == pytest.approx(grey[:4], abs=1e-3)


def test_gemma3n_sees_features_that_its_text_model_multiplies(make: Make) -> None:
    served, weights = make("gemma3n", GEMMA, {"do_normalize": False})
    vision = served.vision
    assert vision is not None, served.no_vision_because
    assert vision.format.size(30, 20) == (768, 768)
    assert vision.format.template_token == PLACEHOLDER
    assert vision.format.tokens(768, 768) == [18, 16, 9, 9, 9, 9, 17, 18]
    pixels = images(1, 768, 768)
    convolution = np.array(weights["vision_tower.timm_model.blocks.0.0.conv_exp.weight"]).reshape(5, -1)
    projection = np.array(weights["embed_vision.embedding_projection.weight"])
    corners = [pixels[0, i : i + 3, j : j + 3].reshape(-1) / 255 for i in (0, 384) for j in (0, 384)]
    wanted = np.array(corners) @ convolution.T @ projection.T / WIDTH**0.5
    assert features(vision, pixels)[0] == pytest.approx(wanted, abs=1e-4)


def test_a_model_that_needs_mlx_vlm_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_vlm.models.llama4")
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    served, _ = make("llama4", LLAMA, {"size": {"height": SIDE, "width": SIDE}})
    assert served.vision is None
    assert "`pip install --no-deps mlx-vlm` let this model see" in served.no_vision_because


def test_images_of_another_size_are_told(make: Make) -> None:
    served, _ = make("gemma3n", GEMMA, {"size": {"height": 512, "width": 512}})
    assert served.vision is None
    assert "its tower takes 768 x 768 pixels" in served.no_vision_because
