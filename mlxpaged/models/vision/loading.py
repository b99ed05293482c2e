"""Loads the vision tower of a model's directory, which mlx-lm leaves out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from mlxpaged.attention import token_groups
from mlxpaged.models.errors import in_one_line
from mlxpaged.models.files.json_files import read_object
from mlxpaged.models.files.weights import WeightReader
from mlxpaged.models.joins.fused_attention import unfuse_for_images
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.turns import Turns
from mlxpaged.models.vision.mlx_vlm import BORROWED
from mlxpaged.models.vision.probe import check_vision
from mlxpaged.progress import ReportAmount
from mlxpaged.vision import MOST_PIXELS
from mlxpaged.vision.families.gemma.family import GEMMA_3, GEMMA_4, GEMMA_4_UNIFIED
from mlxpaged.vision.families.kimi.family import KIMI, KIMI_K2_5
from mlxpaged.vision.families.lfm2.family import LFM2
from mlxpaged.vision.families.pixtral.family import PIXTRAL
from mlxpaged.vision.families.qwen.family import QWEN, QWEN_2, QWEN_2_5
from mlxpaged.vision.family import Family, Settings
from mlxpaged.vision.install import install
from mlxpaged.vision.tower import Vision

logger = logging.getLogger(__name__)

FAMILIES: Mapping[str, Family] = {
    "kimi_k25": KIMI_K2_5,
    "kimi_vl": KIMI,
    "lfm2-vl": LFM2,
    "lfm2_vl": LFM2,
    "mistral3": PIXTRAL,
    "pixtral": PIXTRAL,
    "prism_hadamard_qwen35": QWEN,
    "llava": PIXTRAL,
    "qwen2_vl": QWEN_2,
    "qwen2_5_vl": QWEN_2_5,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "gemma3": GEMMA_3,
    "gemma4": GEMMA_4,
    "gemma4_unified": GEMMA_4_UNIFIED,
    **BORROWED,
}
"""Those that see here, by the model type."""

BLIND: Mapping[str, str] = {
    "deepseek_v41": "mlx-lm leaves out the weights by which experts are chosen for tokens of images",
    "muse_spark": "mlx-lm's model needs Metal, and was not tried here",
}
"""Why other families do not see."""


def load_vision(
    files: ModelFiles,
    config: Mapping[str, Any],
    vocabulary: Callable[[], Mapping[str, int]],
    report: ReportAmount,
    most_pixels: int = MOST_PIXELS,
    dtype: str = "model",
) -> tuple[Vision | None, str]:
    """Returns None and the reason if the model cannot see images; the reason is empty if it was never meant to.

    files: of the model. config: of its config.json. vocabulary: returns the ids of its tokens by their text. report:
    gets the bytes of weights that are read, and of all. most_pixels: of an image; a larger one is reduced. 0 for no
    tower. dtype: as `WeightReader` has it.
    """
    if not isinstance(config.get("vision_config"), Mapping):
        return None, ""
    if most_pixels == 0:
        return None, "images are turned off by --max-image-pixels 0"
    kind, family = config.get("model_type"), family_of(config)
    if family is None:
        because = f": {BLIND[str(kind)]}" if kind in BLIND else ""
        return None, f"images are not supported yet for {kind} models{because}"
    try:
        stored = stored_weights(files, family)
        if not stored:
            return None, "its checkpoint has no vision tower"
        vision, tower = family.make(Settings(config, *read_processors(files), vocabulary(), most_pixels))
        fill(tower, stored, (config.get("quantization") or {}).get("mode", "affine"))
    except Exception as error:  # MLX raises any type for sizes that do not fit one another
        return None, f"its vision tower cannot be loaded: {in_one_line(error)}"
    WeightReader(dtype, 0, report).read(tower)  # the report may raise an error that ends the load
    return vision, ""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json with a `vision_config`; None if its models do not see here."""
    kind = config.get("model_type")
    found = FAMILIES.get(str(kind))
    return found if found is not None and config["vision_config"].get("model_type", kind) in found.kinds else None


def let_see(
    model: Module,
    layers: Sequence[LayerSpec],
    vision: Vision | None,
    reason: str,
    turns: Turns | None = None,
    everywhere: Callable[[bool], bool] = bool,
) -> tuple[Vision | None, str]:
    """Installs a tower and checks that the model sees by it. vision, reason: what `load_vision` returns. turns: of
    other models. everywhere: whether all ranks that share the model say yes. Returns None and the reason if it does
    not."""
    if not everywhere(vision is not None) and vision is not None:
        vision, reason = None, "another rank has no vision tower"
    if vision is not None:
        try:
            vision.rows.part = part_of_step
            install(model, vision)
            unfuse_for_images(model, vision.rows)
            check_vision(model, layers, vision, turns)
        except Exception as error:  # MLX raises any type
            vision, reason = None, in_one_line(error)
    if not everywhere(vision is not None) and vision is not None:
        vision, reason = None, "another rank does not see"
    if reason:
        logger.warning("this model is served without its eyes: %s", reason)
    return vision, reason


def part_of_step() -> tuple[int, int] | None:
    """What `FeatureRows.part` returns."""
    group = token_groups.running
    return None if group is None else (group.first, group.last)


def stored_weights(files: ModelFiles, family: Family) -> dict[str, mx.array]:
    """The weights of the tower and its projector, by their names in the tower. Nothing is read."""
    found: dict[str, mx.array] = {}
    for name, array in files.tensors().items():
        of_tower = family.name_of(name.removeprefix("model."))
        if of_tower is not None:
            found[of_tower] = array
    family.prepare(found)
    return found


def read_processors(files: ModelFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings of the images and those of the prompts. transformers 5 writes them into one file."""
    processor = read_object(files.directory / "processor_config.json", missing_is_empty=True)
    preprocessor = read_object(files.directory / "preprocessor_config.json", missing_is_empty=True)
    return preprocessor or processor.get("image_processor") or {}, processor


def fill(tower: Module, stored: dict[str, mx.array], mode: str) -> None:
    """Puts the weights into the tower, and makes the layers quantized that are so in the checkpoint. mode: of the
    quantization. Raises ValueError if a weight is missing, or of another shape or type."""

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
