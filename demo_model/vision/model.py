"""The shape of the demo model that sees, its saving, and the forward pass that training uses.

It is mlx-lm's Mistral 3 with a Llama as its text model, and the server's own tower of Pixtral's kind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from mlx_lm.models.mistral3 import Model, ModelArgs

from demo_model.vision.tokenizer import OF_PICTURES
from mlxpaged.vision.families.pixtral.family import sizes_of
from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.families.pixtral.tower import PixtralTower

IMAGE_ID, ROW_END_ID, IMAGE_END_ID = 3, 4, 5
"""Of OF_PICTURES, after the special tokens of the other demo."""

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 512,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": IMAGE_ID,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "text_config": TEXT,
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_channels": 3,
        "patch_size": 8,
        "image_size": 128,
        "hidden_act": "silu",
        "rope_theta": 100.0,
    },
}
GENERATION_CONFIG: dict[str, Any] = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
LONGEST = CONFIG["vision_config"]["image_size"]
SIDE = CONFIG["vision_config"]["patch_size"] * CONFIG["spatial_merge_size"]
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
    "patch_size": {"height": SIDE // CONFIG["spatial_merge_size"], "width": SIDE // CONFIG["spatial_merge_size"]},
    "size": {"longest_edge": LONGEST},
}
PROCESSOR: dict[str, Any] = {
    "processor_class": "PixtralProcessor",
    "patch_size": SIDE // CONFIG["spatial_merge_size"],
    "spatial_merge_size": CONFIG["spatial_merge_size"],
    **dict(zip(("image_token", "image_break_token", "image_end_token"), OF_PICTURES, strict=True)),
}

FORMAT = PixtralFormat(
    placeholder=IMAGE_ID, row_end=ROW_END_ID, end=IMAGE_END_ID, longest=(LONGEST, LONGEST), side=SIDE
)


class SeeingModel(Module):
    """Text model and tower, trained together.

    digits: a layer that training alone has.  It tells the digits of a picture by each part's features.  Without it, the
    tower gets nothing to learn from until the text model has found out where to look, which takes very long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = Model(ModelArgs(model_type="mistral3", text_config=dict(TEXT)))
        self.tower = PixtralTower(sizes_of(CONFIG, PREPROCESSOR))
        self.digits = Linear(TEXT["hidden_size"], 10)

    def features(self, pixels: Sequence[mx.array]) -> list[mx.array]:
        """pixels: pictures of one size in each array."""
        return [list(self.tower.encode(group))[-1] for group in pixels]

    def hidden_states(self, tokens: mx.array, features: Sequence[mx.array], sources: npt.NDArray[np.int32]) -> mx.array:
        """The last layer's normalised output.

        sources: for each of the rows' tokens, its index among the tokens and the features after them.
        """
        inner = self.text.language_model.model
        embedded = inner.embed_tokens(tokens)
        rows = [embedded.reshape(-1, embedded.shape[-1])]
        rows += [group.reshape(-1, group.shape[-1]) for group in features]
        mixed = mx.concatenate(rows)[mx.array(sources)].reshape(embedded.shape)
        output: mx.array = inner(tokens, input_embeddings=mixed)
        return output

    def logits(self, hidden: mx.array) -> mx.array:
        output: mx.array = self.text.language_model.model.embed_tokens.as_linear(hidden)
        return output


def save_model(model: SeeingModel, out: Path) -> None:
    """Write the weights, the configurations, and what a processor of pictures reads."""
    weights: dict[str, mx.array] = dict(tree_flatten(model.text.parameters()))
    weights |= dict(tree_flatten(model.tower.parameters()))
    patches, side = "vision_tower.patch_conv.weight", CONFIG["vision_config"]["patch_size"]
    weights[patches] = weights[patches].reshape(-1, side, side, 3)
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    files = {
        "config.json": CONFIG,
        "generation_config.json": GENERATION_CONFIG,
        "preprocessor_config.json": PREPROCESSOR,
        "processor_config.json": PROCESSOR,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
