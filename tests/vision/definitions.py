"""The parts of towers in NumPy, as their definitions say, with one loop for each sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Place = tuple[int, int]


def norm(x: Array, weights: dict[str, Array], name: str, eps: float = 1e-6) -> Array:
    centred = x - x.mean()
    return weights[f"{name}.weight"] * centred / math.sqrt((centred**2).mean() + eps) + weights[f"{name}.bias"]


def linear(x: Array, weights: dict[str, Array], name: str) -> Array:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def exact_gelu(x: Array) -> Array:
    return np.array([each / 2 * (1 + math.erf(each / math.sqrt(2))) for each in x])


def gelu_of_tanh(x: Array) -> Array:
    return np.array([v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x])


def quick_gelu(x: Array) -> Array:
    return np.array([v / (1 + math.exp(-1.702 * v)) for v in x])


def turned(x: Array, row: int, column: int) -> Array:
    half = len(x) // 2
    out = x.copy()
    for i in range(half):
        quarter = half // 2
        angle = (row if i < quarter else column) * 10000.0 ** (-2 * (i % quarter) / half)
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def mixed_heads(heads: Sequence[Array], places: Sequence[Place], sees: Callable[[Place, Place], bool]) -> Array:
    """Attention of patches at these places to those that they see. heads: for each patch, its queries, keys and
    values, [3, heads, size]. Returns [patches, heads, size]."""
    mixed = np.zeros((len(heads), *heads[0].shape[1:]))
    for head in range(mixed.shape[1]):
        queries, keys = (
            [turned(each[part, head], *at) for each, at in zip(heads, places, strict=True)] for part in (0, 1)
        )
        for i, query in enumerate(queries):
            seen = [j for j, place in enumerate(places) if sees(places[i], place)]
            scores = np.array([math.exp(query @ keys[j] / math.sqrt(len(query))) for j in seen])
            for score, j in zip(scores / scores.sum(), seen, strict=True):
                mixed[i, head] += score * heads[j][2, head]
    return mixed
