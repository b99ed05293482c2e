"""Finds the context length of a model in its config.json."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from mlxpaged.models.encoders.encoder_files import read_config
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.kinds import is_encoder

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LENGTH = 4096
"""Assumed if a model's config states none."""

CONTEXT_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    *("model_max_length", "max_context_length", "max_sequence_length"),  # Kimi Linear, OpenELM, OLMo
)
MAX_FACTOR, MAX_ORIGINAL = 1e6, 2**40
"""A YaRN scaling from these on is a mistake."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a config may have its context length, and its text part."""


def context_length(config: Mapping[str, Any]) -> int:
    """`stated_length`, or DEFAULT_CONTEXT_LENGTH."""
    if (found := stated_length(config)) is not None:
        return found
    logger.warning("the model's config has no context length; %d tokens are assumed", DEFAULT_CONTEXT_LENGTH)
    return DEFAULT_CONTEXT_LENGTH


def stated_length(config: Mapping[str, Any]) -> int | None:
    """The longest context that the model was trained for, or that its YaRN scaling reaches, in tokens; from the text
    part of a multimodal config. None if the config has none."""
    if is_encoder(config):
        with contextlib.suppress(UnsupportedModelError):
            return read_config(config).max_tokens
    text: Any = next((part for name in TEXT_PARTS if (part := config.get(name))), {})
    for part in (config, text if isinstance(text, dict) else {}):
        for key in CONTEXT_LENGTHS:
            if isinstance(part.get(key), int) and part[key] > 0:
                return max(int(part[key]), yarn_length(part))
    return None


def yarn_length(config: Mapping[str, Any]) -> int:
    """The context that a YaRN scaling reaches; 0 without one. Users add it to a config.json, and leave the length there
    as it is, as the authors of Qwen3 say."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return 0
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)) or not isinstance(original, int):
        return 0
    return int(factor * original) if 0 < factor < MAX_FACTOR and 0 < original < MAX_ORIGINAL else 0
