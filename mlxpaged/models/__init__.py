"""Models: loading, their layers, output head and tokenizer, and the bundled demo model."""

from mlxpaged.cpu.streams import synchronize
from mlxpaged.models.embedding import EmbeddingFacts, EmbeddingModel
from mlxpaged.models.errors import InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.loader import (
    DEMO_MODEL,
    ServedModel,
    load_embedding_model,
    load_model,
    own_embedding_model,
    resolve_model,
    tool_parsers,
)
from mlxpaged.models.preflight import Reserved
from mlxpaged.models.tokenizer import PLAIN_CALLS, Tags, Tokenizer, ToolFormat
from mlxpaged.models.turns import Turns

__all__ = [
    "DEMO_MODEL",
    "PLAIN_CALLS",
    "EmbeddingFacts",
    "EmbeddingModel",
    "InsufficientMemoryError",
    "ModelNotFoundError",
    "Reserved",
    "ServedModel",
    "Tags",
    "Tokenizer",
    "ToolFormat",
    "Turns",
    "UnsupportedModelError",
    "load_embedding_model",
    "load_model",
    "own_embedding_model",
    "resolve_model",
    "synchronize",
    "tool_parsers",
]
