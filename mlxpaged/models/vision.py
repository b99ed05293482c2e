"""Loads the vision tower of a model's directory, which mlx-lm leaves out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from mlxpaged.attention.self_check import ReportAmount
from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.models.fused_attention import unfuse_for_pictures
from mlxpaged.models.json_files import read_object
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.preflight import WEIGHTS
from mlxpaged.models.vision_probe import check_vision
from mlxpaged.models.weights import read_weights
from mlxpaged.vision.install import install
from mlxpaged.vision.pixtral import ACTIVATIONS, MEAN, STD, PixtralSizes, PixtralTower
from mlxpaged.vision.pixtral_format import PixtralFormat
from mlxpaged.vision.tower import Vision

logger = logging.getLogger(__name__)

MERGES = {"mistral3": True, "pixtral": False, "llava": False}
"""Whether the projector has a merger of patches, by model type. With the type pixtral, mlx-vlm writes what transformers
calls llava."""

PARTS = ("vision_tower.", "multi_modal_projector.")
"""How the names of a tower's weights begin. transformers writes them with `model.` before, and mlx-vlm with
`vision_model.` after vision_tower."""

CONVOLUTION = "vision_tower.patch_conv.weight"


def load_vision(
    path: Path,
    config: Mapping[str, Any],
    vocabulary: Callable[[], Mapping[str, int]],
    report: ReportAmount,
    num_ranks: int = 1,
) -> tuple[Vision | None, str]:
    """Returns None and the reason if the model cannot see pictures; the reason is empty if it was never meant to.

    path: its directory. config: of its config.json. vocabulary: returns the ids of its tokens by their text. report:
    gets the bytes of weights that are read, and of all. num_ranks: that share the model.
    """
    if not isinstance(config.get("vision_config"), Mapping):
        return None, ""
    if num_ranks > 1:
        return None, "a model that several machines share takes no pictures yet"
    kind = config.get("model_type")
    if kind not in MERGES or config["vision_config"].get("model_type") != "pixtral":
        return None, f"pictures are not supported yet for {kind} models"
    try:
        stored = stored_weights(path)
        if not stored:
            return None, "its checkpoint has no vision tower"
        preprocessor, processor = read_processors(path)
        sizes = sizes_of(config, preprocessor)
        tower = PixtralTower(sizes)
        fill(tower, stored, (config.get("quantization") or {}).get("mode", "affine"))
        picture_format = format_of(config, preprocessor, processor, sizes, vocabulary())
    except Exception as error:  # MLX raises any type for sizes that do not fit one another
        return None, f"its vision tower cannot be loaded: {in_one_line(error)}"
    read_weights(tower, report)  # the report may raise an error that ends the load
    return Vision(picture_format, tower), ""


def let_see(
    model: Module, layers: Sequence[LayerSpec], vision: Vision | None, reason: str
) -> tuple[Vision | None, str]:
    """Installs a tower and checks that the model sees by it. vision, reason: what `load_vision` returns. Returns None
    and the reason if it does not."""
    if vision is not None:
        try:
            install(model, vision)
            unfuse_for_pictures(model, vision.rows)
            check_vision(model, layers, vision)
        except (UnsupportedModelError, ValueError) as error:
            vision, reason = None, str(error)
    if reason:
        logger.warning("this model is served without its eyes: %s", reason)
    return vision, reason


def stored_weights(path: Path) -> dict[str, mx.array]:
    """The weights of the tower and its projector, by their names without what writers put before. Nothing is read."""
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob(WEIGHTS)):
        loaded: Any = mx.load(str(file))
        for name, array in loaded.items():
            name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
            if name.startswith(PARTS):
                found[name] = array
    return found


def read_processors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings of the pictures and those of the prompts. transformers 5 writes them into one file."""
    processor = read_object(path / "processor_config.json", missing_is_empty=True)
    preprocessor = read_object(path / "preprocessor_config.json", missing_is_empty=True)
    return preprocessor or processor.get("image_processor") or {}, processor


def sizes_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> PixtralSizes:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    seen, text, merges = config["vision_config"], config["text_config"], MERGES[config["model_type"]]
    layer = config.get("vision_feature_layer", -2 if config["model_type"] == "llava" else -1)
    blocks = seen.get("num_hidden_layers", 24)
    if layer not in (-1, blocks):
        raise ValueError(f"its features come from layer {layer} instead of the last")
    activations = (seen.get("hidden_act", "gelu"), config.get("projector_hidden_act", "gelu"))
    for name in activations:
        if name not in ACTIVATIONS:
            raise ValueError(f"its activation {name} is none of {', '.join(ACTIVATIONS)}")
    rope = seen.get("rope_parameters") or seen
    mean, std = (
        tuple(float(each) for each in preprocessor.get(name) or default)
        for name, default in (("image_mean", MEAN), ("image_std", STD))
    )
    if len(mean) != len(MEAN) or len(std) != len(STD) or min(std) <= 0:
        raise ValueError(f"its pixels cannot be normalized by the mean {mean} and the deviation {std}")
    return PixtralSizes(
        width=seen.get("hidden_size", 1024),
        hidden=seen.get("intermediate_size", 4096),
        blocks=blocks,
        heads=seen.get("num_attention_heads", 16),
        patch=seen.get("patch_size", 16),
        rope_base=float(rope.get("rope_theta", 10000.0)),
        activation=activations[0],
        merge=config.get("spatial_merge_size", 2) if merges else None,
        output=text["hidden_size"],
        projector_activation=activations[1],
        bias=config.get("multimodal_projector_bias", not merges),
        merger_eps=float(text.get("rms_norm_eps", 1e-6)),
        mean=mean,
        std=std,
    )


def format_of(
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    processor: Mapping[str, Any],
    sizes: PixtralSizes,
    vocabulary: Mapping[str, int],
) -> PixtralFormat:
    """Raises ValueError if a token or a size is missing, or is none."""

    def token(name: str, default: str) -> int:
        text = processor.get(name, default)
        if text not in vocabulary:
            raise ValueError(f"its tokenizer has no {text}")
        return vocabulary[text]

    placeholder = config.get("image_token_index", config.get("image_token_id"))
    size = preprocessor.get("size") or {"longest_edge": config["vision_config"].get("image_size", 1024)}
    edge = size.get("longest_edge")
    longest: Any = (edge, edge) if edge else (size.get("width"), size.get("height"))
    if not all(type(each) is int and each > 0 for each in longest):
        raise ValueError(f"the size of its pictures is {size}")
    return PixtralFormat(
        placeholder=token("image_token", "[IMG]") if placeholder is None else int(placeholder),
        row_end=token("image_break_token", "[IMG_BREAK]"),
        end=token("image_end_token", "[IMG_END]"),
        longest=longest,
        side=sizes.patch * (sizes.merge or 1),
    )


def fill(tower: Module, stored: dict[str, mx.array], mode: str) -> None:
    """Puts the weights into the tower, and makes the layers quantized that are so in the checkpoint. mode: of the
    quantization. Raises ValueError if a weight is missing, or of another shape or type."""
    patches = stored.get(CONVOLUTION)
    if patches is not None and patches.ndim == 4:
        if patches.shape[2] == patches.shape[3] != patches.shape[1]:  # torch's layout, [width, colours, side, side]
            patches = patches.transpose(0, 2, 3, 1)
        stored[CONVOLUTION] = patches.flatten(1)

    def packing(name: str, module: Module) -> dict[str, Any] | bool:
        scales = stored.get(f"{name}.scales")
        if scales is None:
            return False
        columns = module.weight.shape[-1]
        bits = stored[f"{name}.weight"].shape[-1] * 32 // columns
        return {"group_size": columns // scales.shape[-1], "bits": bits, "mode": mode}

    quantize(tower, class_predicate=packing)
    expected: Any = tree_flatten(tower.parameters())
    for name, array in expected:
        found = stored.get(name)
        if found is not None and mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(found.dtype, mx.floating):
            raise ValueError(f"{name} has the type {found.dtype}")
    tower.load_weights(list(stored.items()))
