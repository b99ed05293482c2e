"""The tower of Qwen2.5-VL computes what its definition says, in images that windows fill and that they do not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.vision.loading import load_vision
from mlxpaged.vision import blocks
from mlxpaged.vision.families.qwen.qwen2_5 import Qwen25Sizes, Qwen25Tower
from mlxpaged.vision.positions import Axes
from tests.vision.definitions import Array, Place, exact_gelu, linear, mixed_heads
from tests.vision.tiny import images

SIZES = Qwen25Sizes(
    width=24,
    hidden=20,
    blocks=3,
    heads=3,
    patch=4,
    merge=2,
    window=4,
    whole=(1,),
    output=16,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)


def tiny_tower() -> Qwen25Tower:
    tower = Qwen25Tower(SIZES)
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        return mx.random.normal(weight.shape) * (1.0 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1]))

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def features(tower: Qwen25Tower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last)


def rms_norm(x: Array, weight: Array) -> Array:
    return weight * x / math.sqrt((x * x).mean() + 1e-6)


def reference_features(tower: Qwen25Tower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64."""
    found: Any = tree_flatten(tower.parameters())
    weights: dict[str, Array] = {name: np.array(weight, np.float64) for name, weight in found}
    side = SIZES.patch
    rows, columns = image.shape[0] // side, image.shape[1] // side
    places = [(row, column) for row in range(rows) for column in range(columns)]
    state = []
    for row, column in places:
        patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        colours = (patch / 255 - np.array(SIZES.mean)) / np.array(SIZES.std)
        state.append(weights["patch_embed.proj.weight"] @ colours.reshape(-1))

    def in_window(one: Place, other: Place) -> bool:
        return all(a // SIZES.window == b // SIZES.window for a, b in zip(one, other, strict=True))

    for number in range(SIZES.blocks):
        own = {name.removeprefix(f"blocks.{number}."): w for name, w in weights.items()}
        heads = [linear(rms_norm(x, own["norm1.weight"]), own, "attn.qkv").reshape(3, SIZES.heads, -1) for x in state]
        mixed = mixed_heads(heads, places, (lambda *_: True) if number in SIZES.whole else in_window)
        state = [x + linear(y.reshape(-1), own, "attn.proj") for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            y = rms_norm(x, own["norm2.weight"])
            gate = linear(y, own, "mlp.gate_proj")
            state[i] = x + linear(gate / (1 + np.exp(-gate)) * linear(y, own, "mlp.up_proj"), own, "mlp.down_proj")
    out = []
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            square = [state[(row + i) * columns + column + j] for i in range(2) for j in range(2)]
            x = np.concatenate([rms_norm(each, weights["merger.ln_q.weight"]) for each in square])
            out.append(linear(exact_gelu(linear(x, weights, "merger.linear_fc1")), weights, "merger.linear_fc2"))
    return np.array(out)


@pytest.mark.parametrize(("width", "height"), [(8, 8), (16, 16), (24, 16), (16, 40), (40, 24)])
def test_features_are_those_of_the_definition(width: int, height: int) -> None:
    tower, [image] = tiny_tower(), images(1, width, height)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=5e-5 * float(np.abs(wanted).max()))


def test_a_batch_has_the_features_of_each_image_alone() -> None:
    tower, several = tiny_tower(), images(3, 40, 24)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_a_checkpoint_gives_its_tower(tmp_path: Path) -> None:
    """The merger has other names there, and the text model's configuration may be beside that of the tower."""
    weights: dict[str, mx.array] = dict(tree_flatten(tiny_tower().parameters()))
    half = weights["patch_embed.proj.weight"].reshape(-1, 1, 4, 4, 3).transpose(0, 4, 1, 2, 3) / 2
    weights["patch_embed.proj.weight"] = mx.concatenate([half, half], axis=2)
    names = {"merger.linear_fc1": "merger.mlp.0", "merger.linear_fc2": "merger.mlp.2"}
    stored = {}
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        stored[f"visual.{names.get(layer, layer)}.{kind}"] = mx.contiguous(weight)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": SIZES.mean, "image_std": SIZES.std, "min_pixels": 64, "max_pixels": 4096})
    )
    config = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 16,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "image_token_id": 9,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": SIZES.width,
            "intermediate_size": SIZES.hidden,
            "depth": SIZES.blocks,
            "num_heads": SIZES.heads,
            "patch_size": SIZES.patch,
            "window_size": SIZES.window * SIZES.patch,
            "fullatt_block_indexes": list(SIZES.whole),
            "out_hidden_size": SIZES.output,
        },
    }
    vision, reason = load_vision(ModelFiles(tmp_path), config, dict, lambda done, total: None)
    assert vision is not None, reason
    assert vision.axes == Axes((2, 1, 1), interleaved=False)
    assert vision.format.tokens(16, 8) == [9, 9]
    assert isinstance(vision.tower, Qwen25Tower)
    pixels = images(1, 40, 24)
    wanted = features(tiny_tower(), pixels)
    assert features(vision.tower, pixels) == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(), images(2, 40, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts
