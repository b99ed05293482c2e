"""Takes language models of mlx-vlm, if it is installed, for model types that mlx-lm lacks.

mlx-lm's loader reads the files, and the probe checks what a model computes. Only mlx-vlm's modules and their names of
weights are used: its own loader imports code of a model's directory if the config.json asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.models.files.architectures import package_of
from mlxpaged.models.states.states import StateArrays

PARTS = ("text", "vision", "audio", "perceiver", "projector")
"""Parts of a config.json for which mlx-vlm may have a class."""

CACHES = "mlx_vlm.models.cache"


class BorrowedConfig:
    """A config.json, as mlx-lm's loader asks for it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> BorrowedConfig:
        return cls(fields)


class BorrowedModel(Module):
    """The language model of one of mlx-vlm's models, as a model of mlx-lm. Its towers are left out."""

    def __init__(self, config: BorrowedConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        package = package_of(str(config.fields["model_type"]))
        try:
            whole_config = configuration(package, config.fields)
            whole = package.Model(whole_config)
        except Exception as error:  # mlx-vlm's models raise any type for a missing field
            kind = type(error).__name__
            raise UnsupportedModelError(f"mlx-vlm cannot build its model: {kind}: {in_one_line(error)}") from error
        self.language_model: Any = whole.language_model
        paths = [path for path, module in whole.named_modules() if module is self.language_model]
        if not paths:
            raise UnsupportedModelError("mlx-vlm's model of this type has no language model with weights of its own")
        renames_again = hasattr(package, "LanguageModel") and hasattr(whole_config, "text_config")
        self._loading: Any = (whole, paths[0], renames_again)  # a tuple, whose modules are none of this one

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        if hasattr(self.language_model, "_position_ids"):
            self.language_model._position_ids = None  # those of the last prompt, which may have been shorter
        logits: mx.array = self.language_model(inputs, cache=cache).logits
        return logits

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return [of_mlx_lm(cache) for cache in importlib.import_module(CACHES).make_prompt_cache(self.language_model)]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The weights of the language model by their names here, as mlx-vlm's loader makes them. It is called once."""
        (whole, path, renames_again), self._loading = self._loading, ()
        for part in [whole, self.language_model] if renames_again else [whole]:
            weights = part.sanitize(weights) if hasattr(part, "sanitize") else weights
        prefix = f"{path}." if path else ""
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        return {f"language_model.{name}": weight for name, weight in own.items()}


def configuration(package: Any, fields: Mapping[str, Any]) -> Any:
    """mlx-vlm's configuration, with objects for its parts, as its loader makes it."""
    config = {"vision_config": {}, "audio_config": {}, **deepcopy(dict(fields))}
    config.setdefault("text_config", config.pop("llm_config", {}))
    made = package.ModelConfig.from_dict(config)
    for part in PARTS:
        name = f"{part}_config"
        if hasattr(made, name) and config.get(name) is not None:
            setattr(made, name, getattr(package, f"{part.title()}Config").from_dict(config[name]))
    return made


def of_mlx_lm(cache: Any) -> Any:
    """The cache of mlx-lm that keeps the same; the cache itself if there is none."""
    kind, known = type(cache), importlib.import_module(CACHES)
    if kind is known.KVCache:
        return KVCache()
    if kind is known.RotatingKVCache:
        return RotatingKVCache(cache.max_size, cache.keep)
    if kind is known.ChunkedKVCache:
        return ChunkedKVCache(cache.chunk_size)
    if kind is known.ArraysCache:
        return StateArrays(len(cache.cache))
    if kind is known.CacheList:
        return CacheList(*map(of_mlx_lm, cache.caches))
    return cache
