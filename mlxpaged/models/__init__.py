"""Models: loading, their layers, output head and tokenizer, and the bundled demo model."""

from typing import TYPE_CHECKING

from mlxpaged.lazy_names import lazy_names

if TYPE_CHECKING:
    from mlxpaged.cpu.streams import synchronize
    from mlxpaged.models.adapter_path import AdapterPath
    from mlxpaged.models.embedding import EmbeddingFacts, EmbeddingModel
    from mlxpaged.models.errors import InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
    from mlxpaged.models.loader import (
        ServedModel,
        load_embedding_model,
        load_model,
        own_embedding_model,
        read_tokenizer,
        resolve_model,
    )
    from mlxpaged.models.preflight import Reserved
    from mlxpaged.models.short_names import DEMO_MODEL
    from mlxpaged.models.tokenizer import Tags, Tokenizer
    from mlxpaged.models.turns import Turns
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "DEMO_MODEL",
    "AdapterPath",
    "EmbeddingFacts",
    "EmbeddingModel",
    "InsufficientMemoryError",
    "ModelNotFoundError",
    "Reserved",
    "ServedModel",
    "Tags",
    "Tokenizer",
    "Turns",
    "UnsupportedModelError",
    "load_embedding_model",
    "load_model",
    "own_embedding_model",
    "read_tokenizer",
    "resolve_model",
    "synchronize",
]
