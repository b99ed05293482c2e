"""What a model is for, by its config.json and the other small files of its directory. Nothing here imports mlx."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import model_config

BERT = frozenset({"bert"})
ROBERTA = frozenset({"camembert", "roberta", "xlm-roberta"})
MPNET = frozenset({"mpnet"})
NOMIC = frozenset({"nomic_bert"})
GTE = frozenset({"gte", "new"})
MODERNBERT = frozenset({"modernbert"})
ENCODERS = BERT | ROBERTA | MPNET | NOMIC | GTE | MODERNBERT
"""Values of `model_type`: models whose tokens attend in both directions, as encoder.py computes them."""

PAIRS = "ForSequenceClassification"
"""The end of the name of a cross-encoder's architecture."""

QWEN_RERANKER = "qwen3-reranker"
"""A model with this in its name is a reranker that generates text. Its directory is that of any Qwen3."""


class Kind(str, Enum):
    """The kind that lists of models show."""

    TEXT = "text"
    VISION = "vision"  # generates text, and sees images
    EMBEDDING = "embedding"
    RERANKER = "reranker"

    @property
    def generates(self) -> bool:
        """Whether models of this kind are for generating text."""
        return self in (Kind.TEXT, Kind.VISION)


def is_encoder(config: Mapping[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in ENCODERS


def judges_pairs(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a cross-encoder, which gives a score to a pair of texts."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return is_encoder(config) and any(str(name).endswith(PAIRS) for name in names)


def kind_of(name: str, directory: Path) -> Kind:
    """The kind of a model that is not loaded. name: of its repository or directory."""
    try:
        config: Mapping[str, Any] = model_config(directory, missing_is_empty=True)
    except UnsupportedModelError:
        config = {}
    if judges_pairs(config) or QWEN_RERANKER in name.lower():
        return Kind.RERANKER
    if is_encoder(config) or (directory / "modules.json").is_file():
        return Kind.EMBEDDING
    return Kind.VISION if isinstance(config.get("vision_config"), Mapping) else Kind.TEXT
