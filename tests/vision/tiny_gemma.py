"""Tiny towers of Gemma's kinds with random weights."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.vision.tower import Tower
from tests.vision.definitions import Array

OfModule = TypeVar("OfModule", bound=Module)


def with_random_weights(tower: OfModule, dtype: mx.Dtype = mx.float32) -> OfModule:
    """They are large enough for each of them to change the features."""
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        if name.endswith(("_min", "_max")):
            return (mx.random.uniform(0.5, 1.5) * (1 if name.endswith("_max") else -1)).astype(dtype)
        spread = 1.0 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1])
        return (mx.random.normal(weight.shape) * spread).astype(dtype)

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def weights_of(tower: Module) -> dict[str, Array]:
    found: Any = tree_flatten(tower.parameters())
    return {name: np.array(weight.astype(mx.float32), np.float64) for name, weight in found}


def features(tower: Tower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last.astype(mx.float32))
