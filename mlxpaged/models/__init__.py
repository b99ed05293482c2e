"""From a name to a model that can be served: weights, layers, output head, tokenizer, and the bundled demo model."""

from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.loader import DEMO_MODEL, ServedModel, load_model, resolve_model
from mlxpaged.models.tokenizer import Tokenizer

__all__ = [
    "DEMO_MODEL",
    "LayerSpec",
    "ModelNotFoundError",
    "ServedModel",
    "Tokenizer",
    "UnsupportedModelError",
    "load_model",
    "resolve_model",
]
