"""The table of model types: which package has the code of each. Code of a model's own directory is never imported.

mlx-lm's types come first. Those that it lacks are taken from mlx-vlm, if that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from enum import Enum
from importlib import metadata
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.models.files.kinds import is_encoder

GGUF_BYTES = "gguf_bytes"
"""The field of the config.json that is made for a GGUF file: bytes of its weights in memory."""

MODULES = {"lfm2_vl": "lfm2-vl"}
"""mlx-lm's modules, by the model types that it does not know them by."""

INSTALL = "`pip install requests pillow` and `pip install --no-deps mlx-vlm`"


class Source(str, Enum):
    """Where the code of a model's type comes from."""

    MLX_LM = "mlx-lm"
    MLX_VLM = "mlx-vlm"
    OWN = "mlxpaged"  # encoders
    GGUF = "gguf"  # a module of mlx-lm, with the names of llama.cpp's weights


def source_of(config: Mapping[str, Any]) -> Source:
    """Raises UnsupportedModelError if no package has the code, or only code that cannot generate text."""
    if GGUF_BYTES in config:
        return Source.GGUF
    if is_encoder(config):
        return Source.OWN
    model_type = str(config.get("model_type"))
    if any(map(has_module, modules_of(model_type))):
        return Source.MLX_LM
    package_of(model_type)
    return Source.MLX_VLM


def known_source(config: Mapping[str, Any]) -> Source | None:
    """`source_of`, or None if no package has the code."""
    try:
        return source_of(config)
    except UnsupportedModelError:
        return None


def modules_of(model_type: str) -> set[str]:
    """The names under which mlx-lm may import this architecture."""
    # Versions of mlx-lm before 0.32 have only the first of the two tables.
    by_architecture = getattr(mlx_lm_utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    names = {name for (remapped, _), name in by_architecture.items() if remapped == model_type}
    return names | {model_type, mlx_lm_utils.MODEL_REMAPPING.get(model_type, model_type), MODULES.get(model_type, "")}


def has_module(name: str, package: str = "mlx_lm.models") -> bool:
    """A dot would import a package on the way."""
    return bool(name) and "." not in name and importlib.util.find_spec(f"{package}.{name}") is not None


def package_of(model_type: str) -> Any:
    """The package of mlx-vlm for a type that mlx-lm lacks. Raises UnsupportedModelError if there is none, or if it has
    no language model."""
    lacks = f"mlx-lm {metadata.version('mlx-lm')} does not have its architecture (model_type {model_type!r})"
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UnsupportedModelError(f"{lacks}; a newer mlx-lm may have it, or mlx-vlm: {INSTALL}")
    try:
        name = importlib.import_module("mlx_vlm.utils").MODEL_REMAPPING.get(model_type, model_type)
        package = importlib.import_module(f"mlx_vlm.models.{name}") if has_module(name, "mlx_vlm.models") else None
    except Exception as error:  # a library that is missing, or that mlx-vlm does not fit
        raise UnsupportedModelError(f"{lacks}, and that of mlx-vlm cannot be imported: {in_one_line(error)}") from error
    if package is None or not hasattr(package, "ModelConfig"):
        raise UnsupportedModelError(f"{lacks}, and neither has mlx-vlm; a newer mlx-lm may have it")
    if not has_language_model(package.Model):
        raise UnsupportedModelError(f"{lacks}, and that of mlx-vlm has no language model, so it generates no text")
    return package


def has_language_model(model_class: type) -> bool:
    """Whether objects of a class have a `language_model`, which need not be built for that."""
    codes = [getattr(vars(base).get("__init__"), "__code__", None) for base in model_class.__mro__]
    is_set = any(code is not None and "language_model" in code.co_names for code in codes)
    return is_set or hasattr(model_class, "language_model")
