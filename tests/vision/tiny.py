"""A tiny tower of Pixtral's kind with random weights, and the same tower in NumPy, with one loop for each sum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.vision.families.pixtral.tower import PixtralSizes, PixtralTower

Array = npt.NDArray[np.float64]

MERGED = PixtralSizes(
    width=24,
    hidden=20,
    blocks=2,
    heads=3,
    patch=4,
    rope_base=100.0,
    activation="silu",
    merge=2,
    output=16,
    projector_activation="gelu",
    bias=False,
    merger_eps=1e-3,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)
"""Of a Mistral 3."""

PLAIN = replace(MERGED, merge=None, bias=True, activation="gelu")
"""Of a Pixtral."""


def tiny_tower(sizes: PixtralSizes, dtype: mx.Dtype = mx.float32) -> PixtralTower:
    """Its weights are large enough for each of them to change the features."""
    tower = PixtralTower(sizes)
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        if name.endswith("bias"):
            return mx.random.normal(weight.shape).astype(dtype)
        spread = 1.0 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1])
        return (mx.random.normal(weight.shape) * spread).astype(dtype)

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def images(number: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(width).integers(0, 256, (number, height, width, 3), dtype=np.uint8)


def features(tower: PixtralTower, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    *_, last = tower.encode(mx.array(pixels))
    return np.array(last.astype(mx.float32))


def reference_features(tower: PixtralTower, image: npt.NDArray[np.uint8]) -> Array:
    """Of one image, [height, width, 3], in float64."""
    of_tower: Any = tree_flatten(tower.parameters())
    weights: dict[str, Any] = {name: np.array(weight.astype(mx.float32), np.float64) for name, weight in of_tower}
    sizes, side = tower.sizes, tower.sizes.patch
    rows, columns = image.shape[0] // side, image.shape[1] // side
    places = [(row, column) for row in range(rows) for column in range(columns)]
    state = []
    for row, column in places:
        patch = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        colours = (patch / 255 - np.array(sizes.mean)) / np.array(sizes.std)
        embedded = weights["vision_tower.patch_conv.weight"] @ colours.reshape(-1)
        state.append(norm(embedded, weights["vision_tower.ln_pre.weight"], 1e-5))
    for block in range(sizes.blocks):
        of_block = f"vision_tower.transformer.layers.{block}."
        own = {name.removeprefix(of_block): w for name, w in weights.items() if name.startswith(of_block)}
        normed = [norm(x, own["attention_norm.weight"], 1e-5) for x in state]
        mixed = attention(normed, places, sizes, own)
        state = [x + own["attention.o_proj.weight"] @ y for x, y in zip(state, mixed, strict=True)]
        for i, x in enumerate(state):
            y = norm(x, own["ffn_norm.weight"], 1e-5)
            gate = activated(sizes.activation, own["feed_forward.gate_proj.weight"] @ y)
            state[i] = x + own["feed_forward.down_proj.weight"] @ (gate * (own["feed_forward.up_proj.weight"] @ y))
    projector = {name.removeprefix("multi_modal_projector."): w for name, w in weights.items()}
    if sizes.merge is not None:
        state = merged([norm(x, projector["norm.weight"], sizes.merger_eps) for x in state], rows, columns, sizes.merge)
        state = [projector["patch_merger.merging_layer.weight"] @ x for x in state]
    out = []
    for x in state:
        y = activated(sizes.projector_activation, projector["linear_1.weight"] @ x + projector.get("linear_1.bias", 0))
        out.append(projector["linear_2.weight"] @ y + projector.get("linear_2.bias", 0))
    return np.array(out)


def norm(x: Array, weight: Array, eps: float) -> Array:
    return weight * x / math.sqrt((x * x).mean() + eps)


def activated(name: str, x: Array) -> Array:
    if name == "silu":
        return np.array([each / (1 + math.exp(-each)) for each in x])
    return np.array([each / 2 * (1 + math.erf(each / math.sqrt(2))) for each in x])


def turned(x: Array, place: tuple[int, int], base: float) -> Array:
    """A head's values. Pair i of them, i and half + i, turns with the row if i is below a quarter, else the column."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        by_row = i < (half + 1) // 2
        frequency = base ** (-2 * (2 * i if by_row else 2 * (i - (half + 1) // 2) + 1) / len(x))
        angle = place[0 if by_row else 1] * frequency
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attention(state: list[Array], places: list[tuple[int, int]], sizes: PixtralSizes, own: dict[str, Any]) -> Array:
    mixed = np.zeros((len(state), sizes.width))
    size = sizes.width // sizes.heads
    for head in range(sizes.heads):
        part = slice(head * size, (head + 1) * size)
        q, k, v = ([(own[f"attention.{name}_proj.weight"] @ x)[part] for x in state] for name in ("q", "k", "v"))
        q = [turned(x, place, sizes.rope_base) for x, place in zip(q, places, strict=True)]
        k = [turned(x, place, sizes.rope_base) for x, place in zip(k, places, strict=True)]
        for i, query in enumerate(q):
            scores = np.array([math.exp(query @ key / math.sqrt(size)) for key in k])
            mixed[i, part] = sum(score * value for score, value in zip(scores / scores.sum(), v, strict=True))
    return mixed


def merged(state: list[Array], rows: int, columns: int, merge: int) -> list[Array]:
    """Squares of patches as vectors: for each value of a patch, that value of all patches of the square."""
    out = []
    for row in range(0, rows, merge):
        for column in range(0, columns, merge):
            square = [state[(row + i) * columns + column + j] for i in range(merge) for j in range(merge)]
            out.append(np.array([patch[value] for value in range(len(square[0])) for patch in square]))
    return out
