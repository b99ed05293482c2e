"""The files of a model on this machine: its config, its tensors by name and their shapes, and what loads them.

A directory has small files in any case, config.json and the tokenizer's, and its weights as safetensors or as GGUF. The
loader asks this module, not for names of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model as load_weights

from mlxpaged.cpu.float32 import Sizes, Storage
from mlxpaged.models.files.json_files import model_config
from mlxpaged.models.files.weight_names import classes_of
from mlxpaged.models.sources.gguf.file import GgufFile, read_gguf
from mlxpaged.models.sources.gguf.weights import load_gguf, sizes_of
from mlxpaged.models.sources.preflight import GGUF, weight_paths
from mlxpaged.models.sources.weight_headers import check_sizes, read_shapes
from mlxpaged.progress import ReportAmount


class StoredTensors(NamedTuple):
    """Those of one file, by name. is_converted: whether MLX has written it."""

    arrays: dict[str, mx.array]
    is_converted: bool


class ModelFiles:
    """Those of a directory, or one file of weights. All but the constructor raise
    UnsupportedModelError if a file is damaged."""

    def __init__(self, path: Path) -> None:
        self.directory = path if path.is_dir() else path.parent
        self._paths = weight_paths(path) if path.is_dir() else [path]
        self.is_gguf = bool(self._paths) and self._paths[0].suffix == GGUF

    @cached_property
    def config(self) -> dict[str, Any]:
        return model_config(self.directory)

    @cached_property
    def _gguf(self) -> GgufFile:
        return read_gguf(self._paths[0])

    @cached_property
    def shapes(self) -> list[list[int]]:
        """Those of all tensors, by the headers of the files, which are checked."""
        if self.is_gguf:
            return [list(tensor.shape) for tensor in self._gguf.tensors.values()]
        return [shape for path in self._paths for shape in read_shapes(path)]

    def check_sizes(self, config: dict[str, Any]) -> None:
        """Raises UnsupportedModelError if the config asks for more than the weights can have, or a file is damaged."""
        check_sizes(config, self.shapes)

    def stored(self) -> Iterator[StoredTensors]:
        """The tensors of safetensors, file by file. They are not read yet. Those of a GGUF file have other names, and
        only `load` makes arrays of them: this yields none."""
        if self.is_gguf or not self.shapes:  # MLX opens no damaged file
            return
        for path in self._paths:
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            yield StoredTensors(arrays, metadata.get("format") == "mlx")

    def tensors(self) -> dict[str, mx.array]:
        """Those of `stored`, of all files."""
        return {name: array for each in self.stored() for name, array in each.arrays.items()}

    @property
    def gguf_sizes(self) -> Sizes | None:
        """Bytes of a GGUF file's weights in each storage; None for safetensors, of which the model tells that."""
        return sizes_of(self._gguf) if self.is_gguf else None

    def load(self, report: ReportAmount, storage: Storage = Storage.MODEL) -> tuple[Module, dict[str, Any]]:
        """The model and its config. Weights of safetensors are not read yet. report: gets the bytes of a GGUF file that
        are read, and of all. storage: of the weights of a GGUF file. Raises any exception."""
        if self.is_gguf:
            return load_gguf(self.directory, self._gguf, report, storage)
        model, config = load_weights(self.directory, lazy=True, get_model_classes=classes_of)
        return model, config
