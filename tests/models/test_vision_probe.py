"""A model sees only if the probe finds that its tower and its layers give what they give alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.features import Feature
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.turns import Turns
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.models.vision.probe import check_vision
from mlxpaged.progress import Progress
from mlxpaged.vision.families.gemma.gemma3 import Gemma3Tower
from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.positions import Axes
from mlxpaged.vision.tower import Tower, Vision
from tests.engine.seeing import PatchFormat, load_seeing
from tests.models.architectures import make_architecture
from tests.vision import test_gemma3, test_gemma4, tiny_kimi, tiny_lfm2
from tests.vision.tiny import MERGED, tiny_tower
from tests.vision.tiny_gemma import with_random_weights
from tests.vision.tiny_qwen import OLD, files, make_seeing, old_config

SIZES = replace(MERGED, output=64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral 3 with the tokenizer of the demo model."""
    path = make_architecture(tmp_path_factory.mktemp("seeing") / "m", "mistral3")
    weights: Any = tree_flatten(tiny_tower(SIZES).parameters())
    mx.save_safetensors(str(path / "model-tower.safetensors"), dict(weights))
    config = json.loads((path / "config.json").read_text())
    seen = {
        "model_type": "pixtral",
        "hidden_size": SIZES.width,
        "intermediate_size": SIZES.hidden,
        "num_hidden_layers": SIZES.blocks,
        "num_attention_heads": SIZES.heads,
        "patch_size": SIZES.patch,
        "image_size": 64,
        "hidden_act": SIZES.activation,
        "rope_theta": SIZES.rope_base,
    }
    config |= {"vision_config": seen, "image_token_index": 10, "spatial_merge_size": SIZES.merge}
    (path / "config.json").write_text(json.dumps(config))
    tokens: Any = load_tokenizer(path)
    names = {"image_break_token": 11, "image_end_token": 12}
    texts = {name: tokens.convert_ids_to_tokens(token) for name, token in names.items()}
    (path / "processor_config.json").write_text(json.dumps(texts))
    return path


@pytest.fixture
def served(path: Path) -> ServedModel:
    return load_model(str(path))


def test_a_model_that_sees(served: ServedModel) -> None:
    assert served.vision is not None
    assert served.missing[Feature.IMAGES] == ""
    tower: Any = tree_flatten(tiny_tower(SIZES).parameters())
    assert served.vision.tower.nbytes == sum(array.nbytes for _, array in tower)
    assert served.vision.format.tokens(16, 8) == [10, 10, 12]
    assert served.vision.format.tokens(16, 16) == [10, 10, 11, 10, 10, 12]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"])
def test_qwen_models_see(tmp_path: Path, kind: str) -> None:
    """Those with linear attention rotate 4 elements of a head, by two axes here, and take no features in layers."""
    served = load_model(str(make_seeing(make_architecture(tmp_path / "m", kind), kind)))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    deep, sections = (2, (4, 2, 2)) if kind.startswith("qwen3_vl") else (0, (1, 1, 0))
    assert served.vision.num_deep == deep
    assert served.vision.axes == Axes(sections, interleaved=True)


def test_qwen2_vl_sees(tmp_path: Path) -> None:
    sizes = replace(OLD, output=64)
    path = files(make_architecture(tmp_path / "m", "qwen2_vl"), sizes, "visual.", True, "model-tower.safetensors")
    config = json.loads((path / "config.json").read_text())
    more = old_config()
    more["vision_config"]["hidden_size"] = sizes.output
    config["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 2]}
    (path / "config.json").write_text(json.dumps(more | config))
    served = load_model(str(path))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    assert served.vision.axes == Axes((4, 2, 2), interleaved=False)
    assert served.vision.format.tokens(16, 8) == [9, 9]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_gemma_models_see(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their layers are compared under the masks that they were trained with: without these, they are refused."""
    path = make_architecture(tmp_path / "m", kind)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    if kind == "gemma3":
        config = test_gemma3.CONFIG | config
        tower: Any = tree_flatten(
            with_random_weights(Gemma3Tower(replace(test_gemma3.SIZES, output=text["hidden_size"]))).parameters()
        )
        preprocessor = test_gemma3.PREPROCESSOR
    else:
        sizes = replace(test_gemma4.CLIPPED, output=text["hidden_size"])
        config = test_gemma4.config_of(sizes) | config
        text["use_bidirectional_attention"] = "vision"
        tower = tree_flatten(test_gemma4.tiny_tower(sizes).parameters())
        preprocessor = test_gemma4.PREPROCESSOR
    mx.save_safetensors(str(path / "model-tower.safetensors"), dict(tower))
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (path / "config.json").write_text(json.dumps(config))

    def load(files: ModelFiles, config: Any, vocabulary: Any, *more: Any) -> Any:
        return load_vision(files, config, lambda: vocabulary() | {"\n\n": 4}, *more)

    monkeypatch.setattr("mlxpaged.models.loader.load_vision", load)
    served = load_model(str(path))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    windows = {layer.window: layer.mutual for layer in served.kv_layers}
    assert windows == ({None: True, 12: True} if kind == "gemma3" else {None: False, 12: True})
    monkeypatch.setattr("mlxpaged.models.vision.probe.let_look_ahead", lambda *_: None)
    assert "does not reproduce its logits" in load_model(str(path)).missing[Feature.IMAGES]


def test_lfm2_vl_sees(tmp_path: Path) -> None:
    sizes = replace(tiny_lfm2.NORMED, output=64)
    path = make_architecture(tmp_path / "m", "lfm2-vl")
    tiny_lfm2.files(path, tiny_lfm2.stored_weights(tiny_lfm2.tiny_tower(sizes), "mlx-vlm"), "model-tower.safetensors")
    config = json.loads((path / "config.json").read_text())
    more = {"text_config": config["text_config"], "use_image_special_tokens": False}
    (path / "config.json").write_text(json.dumps(config | tiny_lfm2.config_of(sizes) | more))
    served = load_model(str(path))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    assert served.vision.format.tokens(16, 8) == [9, 9]


@pytest.mark.parametrize("kind", ["kimi_vl", "kimi_k25"])
def test_kimi_models_see(tmp_path: Path, kind: str) -> None:
    sizes = replace(tiny_kimi.SIZES, output=64)
    path = make_architecture(tmp_path / "m", kind)
    tower = tiny_kimi.tiny_tower(sizes)
    if kind == "kimi_vl":
        weights, seen = tiny_kimi.stored_weights(tower, of_mlx_vlm=False), tiny_kimi.config_of(sizes)
    else:
        weights, seen = tiny_kimi.stored_weights_of_k2_5(tower, of_mlx_vlm=False), tiny_kimi.config_of_k2_5(sizes)
    tiny_kimi.files(path, weights, "model-tower.safetensors")
    config = json.loads((path / "config.json").read_text())
    more = {"text_config": config["text_config"]}
    (path / "config.json").write_text(json.dumps(config | seen | more))
    served = load_model(str(path))
    assert served.vision is not None, served.missing[Feature.IMAGES]
    assert served.vision.format.tokens(16, 8) == [9, 9]


class OtherTower(Tower):
    """Changes the features of the model's own tower."""

    def __init__(self, vision: Vision, change: Any) -> None:
        super().__init__()
        self._tower, self._change = vision.tower, change

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        for state in self._tower.encode(pixels):
            yield state
        yield self._change(state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda features: features[:, :-1], "rows of an image"),
        (lambda features: features + len(features), "other features beside another"),
        (lambda features: features * mx.nan, "other features beside another"),
    ],
    ids=["rows", "batch", "nan"],
)
def test_a_tower_that_is_not_right(served: ServedModel, change: Any, reason: str) -> None:
    assert served.vision is not None
    vision = replace(served.vision, tower=OtherTower(served.vision, change))
    with pytest.raises(UnsupportedModelError, match=reason):
        check_vision(served.model, served.layers, vision)


def test_rows_of_a_large_image_are_counted_and_not_computed(served: ServedModel) -> None:
    assert served.vision is not None
    form = served.vision.format
    assert isinstance(form, PixtralFormat)
    small = replace(form, longest=(16, 16))
    count = form.tokens(*form.size(96, 64)).count(form.placeholder)
    assert small.tokens(*small.size(96, 64)).count(form.placeholder) == 4 < count
    for num_rows in (count, count + 1):

        def change(features: mx.array, num_rows: int = num_rows) -> mx.array:
            return features if features.shape[1] == 4 else mx.zeros((1, num_rows, 2**30, 2**30))  # more than any memory

        vision = replace(served.vision, tower=OtherTower(served.vision, change), small=small)
        if num_rows == count:
            check_vision(served.model, served.layers, vision)
        else:
            with pytest.raises(UnsupportedModelError, match=f"makes {count + 1} rows of an image, .* has {count}"):
                check_vision(served.model, served.layers, vision)


@pytest.mark.parametrize("token", [10**9, -1])
def test_an_image_with_a_token_that_has_no_embedding(served: ServedModel, token: int) -> None:
    """MLX would read beyond the weights, and the process would end."""
    assert served.vision is not None
    assert isinstance(served.vision.format, PixtralFormat)
    vision = replace(served.vision, format=replace(served.vision.format, end=token))
    with pytest.raises(UnsupportedModelError, match=f"its images have token {token}, and its embedding has [0-9,]+"):
        check_vision(served.model, served.layers, vision)


def test_a_model_that_does_not_use_its_features(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.vision is not None
    monkeypatch.setattr(served.vision.rows, "put_into", lambda embedded: embedded)
    with pytest.raises(UnsupportedModelError, match="do not depend on an image"):
        check_vision(served.model, served.layers, served.vision)


def test_tokens_of_an_image_that_see_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By masks in mlx-lm's caches, and by spans in paged ones. Without the masks, the logits are others."""
    path = make_architecture(tmp_path / "m", "gemma3_text")
    served, tower = load_seeing(path, mutual="all")
    assert served.vision is not None
    check_vision(served.model, served.layers, served.vision)
    large = replace(served.vision, format=PatchFormat())
    with pytest.raises(UnsupportedModelError, match="an image has 96 rows, and a layer sees 12 keys"):
        check_vision(served.model, served.layers, large)
    monkeypatch.setattr("mlxpaged.models.vision.probe.let_look_ahead", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its logits for an image"):
        check_vision(served.model, served.layers, served.vision)
    assert tower.calls


def test_features_that_are_put_elsewhere_in_a_chunk(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.vision is not None
    rows, put_into = served.vision.rows, served.vision.rows.put_into

    def put(embedded: mx.array) -> mx.array:
        if rows.where is not None and embedded.shape[1] == 1:
            rows.where = rows.where[::-1]
        return put_into(embedded)

    monkeypatch.setattr(rows, "put_into", put)
    with pytest.raises(UnsupportedModelError, match="does not reproduce its logits for an image"):
        check_vision(served.model, served.layers, served.vision)


def test_a_model_without_an_embedding_that_is_known_is_served_as_text(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlxpaged.vision.install.embedding_of", lambda model: None)
    served = load_model(str(path))
    assert served.vision is None
    assert served.missing[Feature.IMAGES] == "its embedding was not found"
    assert "served without its eyes: its embedding was not found" in caplog.text


def test_other_models_take_turns_when_no_image_is_in_a_step(served: ServedModel) -> None:
    vision = served.vision
    assert vision is not None
    shown = []

    def turn(progress: Progress) -> None:
        shown.append(vision.rows.where)

    check_vision(served.model, served.layers, vision, Turns(turn))
    assert len(shown) > 20
    assert set(shown) == {None}
