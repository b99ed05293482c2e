"""The files of a model on this machine: the shapes of its weights, and what loads them.

A directory has small files in any case, config.json and the tokenizer's, and its weights as safetensors or as GGUF. The
loader asks this module, not for names of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model as load_weights

from mlxpaged.attention.self_check import ReportAmount
from mlxpaged.models.gguf.file import GgufFile, read_gguf
from mlxpaged.models.gguf.weights import load_gguf
from mlxpaged.models.preflight import weight_paths
from mlxpaged.models.weight_headers import check_sizes, read_shapes
from mlxpaged.models.weight_names import classes_of


class ModelFiles:
    """Those of a directory that `resolve_model` has returned. Raises UnsupportedModelError if a GGUF file is
    damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths = weight_paths(directory)
        is_gguf = bool(self.paths) and self.paths[0].suffix == ".gguf"
        self._gguf: GgufFile | None = read_gguf(self.paths[0]) if is_gguf else None

    @property
    def is_gguf(self) -> bool:
        return self._gguf is not None

    def check_sizes(self, config: dict[str, Any]) -> None:
        """Raises UnsupportedModelError if the config asks for more than the weights can have, or a file is damaged."""
        if self._gguf is not None:
            shapes = [list(tensor.shape) for tensor in self._gguf.tensors.values()]
        else:
            shapes = [shape for path in self.paths for shape in read_shapes(path)]
        check_sizes(config, shapes)

    def load(self, report: ReportAmount) -> tuple[Module, dict[str, Any]]:
        """The model and its config. Weights of safetensors are not read yet. report: gets the bytes of a GGUF file that
        are read, and of all. Raises any exception."""
        if self._gguf is not None:
            return load_gguf(self.directory, self._gguf, report)
        model, config = load_weights(self.directory, lazy=True, get_model_classes=classes_of)
        return model, config
