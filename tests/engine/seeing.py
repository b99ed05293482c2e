"""A tiny text model with a made-up tower, its images and prompts, and its answers by mlx-lm alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.joins.fused_attention import unfuse_for_images
from mlxpaged.models.layers import mutual as mutual_layers
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.models.vision.loading import part_of_step
from mlxpaged.vision.embedding import embedding_of
from mlxpaged.vision.image import LARGEST, PromptImage, Resampling
from mlxpaged.vision.install import install
from mlxpaged.vision.positions import Axes
from mlxpaged.vision.tower import Tower, Vision
from tests.answers import greedy_answer

Mutual = Literal["none", "windows", "all"]

Fault = Literal["", "delta", "deepstack", "masks"]
"""What is left out of a reference, to show that answers depend on it: that tokens after an image are nearer to it than
their indices say, the features of the first layers, or that the tokens of an image see one another."""

SCALES: dict[Mutual, float] = {"none": 0.01, "windows": 1e-4, "all": 1e-4}
"""Of features: Gemma multiplies embeddings by the square root of their size."""

PATCH = 8
PLACEHOLDER = 3


class PatchFormat:
    """An image is one token for each patch, without others. most: width and height."""

    template_token = placeholder = PLACEHOLDER
    settings = b"patches"
    resampling: Resampling = "BICUBIC"
    joins: Mapping[tuple[int, int], int] = MappingProxyType({})

    def __init__(self, most: tuple[int, int] = LARGEST) -> None:
        self.most = most

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // PATCH, width // PATCH

    def size(self, width: int, height: int) -> tuple[int, int]:
        width, height = min(width, self.most[0]), min(height, self.most[1])
        return max(1, width // PATCH) * PATCH, max(1, height // PATCH) * PATCH

    def tokens(self, width: int, height: int) -> list[int]:
        return [PLACEHOLDER] * (width // PATCH * height // PATCH)


class PatchTower(Tower):
    """Features of a patch are a projection of its values. calls: the shapes of what was encoded. faulty: a value of the
    first pixel that cannot be encoded. scale: of the features. Large ones hide what layers add to them."""

    def __init__(self, width: int, num_deep: int = 0, scale: float = 0.01) -> None:
        super().__init__()
        self.weights = mx.random.normal((PATCH * PATCH * 3, width * (1 + num_deep)), key=mx.random.key(7)) * scale
        self.shape = (-1, 1 + num_deep, width) if num_deep else (-1, width)
        self.parts = 3
        self.calls: list[tuple[int, ...]] = []
        self.steps = 0
        self.faulty: int | None = None

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        self.calls.append(pixels.shape)
        n, height, width, _ = pixels.shape
        patches = pixels.reshape(n, height // PATCH, PATCH, width // PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
        state = patches.reshape(n, -1, PATCH * PATCH * 3).astype(mx.float32)
        for _ in range(self.parts - 1):
            self.steps += 1
            yield state
        if self.faulty is not None and self.faulty in np.array(pixels[:, 0, 0, 0]).tolist():
            raise RuntimeError("this image cannot be encoded")
        self.steps += 1
        yield (state @ self.weights).reshape(n, *self.shape)


def image(seed: int, width: int, height: int) -> PromptImage:
    """One without positions."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PromptImage(hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels, ())


def shown(*parts: Sequence[int] | PromptImage) -> tuple[list[int], tuple[PromptImage, ...]]:
    """A prompt of tokens and images in this order: its tokens, and its images with their positions."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, PromptImage):
            height, width, _ = part.pixels.shape
            tokens = PatchFormat().tokens(width, height)
            positions = tuple(range(len(prompt), len(prompt) + len(tokens)))
            images.append(dataclasses.replace(part, positions=positions))
            prompt += tokens
        else:
            prompt += part
    return prompt, tuple(images)


def load_seeing(
    path: Path,
    axes: Axes | None = None,
    num_deep: int = 0,
    mutual: Mutual = "none",
    adapters: Sequence[AdapterPath] = (),
    drafts: bool = False,
    mtp: str | None = None,
) -> tuple[ServedModel, PatchTower]:
    """drafts: with the head that drafts for it. mtp: where that is, if it has files of its own."""
    served = load_model(str(path), LoadOptions(adapters=adapters, drafts=drafts, mtp_path=mtp))
    return with_tower(served, axes, num_deep, mutual)


def with_tower(
    served: ServedModel, axes: Axes | None = None, num_deep: int = 0, mutual: Mutual = "none"
) -> tuple[ServedModel, PatchTower]:
    """Lets a loaded model see."""
    tower = PatchTower(hidden_size(served.model), num_deep, SCALES[mutual])
    most = LARGEST if mutual == "none" else (32, 24)
    vision = Vision(PatchFormat(most), tower, axes, num_deep, mutual)
    vision.rows.part = part_of_step
    install(served.model, vision)
    unfuse_for_images(served.model, vision.rows)
    return dataclasses.replace(served, vision=vision, layers=mutual_layers(served.layers, mutual)), tower


def hidden_size(model: Any) -> int:
    embedding: Any = embedding_of(model)
    return int(embedding(mx.array([[0]])).shape[-1])


def expected_answer(
    path: Path,
    prompt: Sequence[int],
    images: Sequence[PromptImage],
    axes: Axes | None = None,
    num_deep: int = 0,
    num_tokens: int = 16,
    mutual: Mutual = "none",
    adapter: Path | None = None,
    without: Fault = "",
) -> list[int]:
    """By mlx-lm's model alone, in one pass over the prompt, with the features in place of its embeddings, added to the
    outputs of its first layers, and rotated by three axes, and with masks that are written out."""
    model, _ = load_plain_model(path)
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    where = [position for each in images for position in each.positions]
    ids = [0 if i in set(where) else token for i, token in enumerate(prompt)]
    if images:
        tower = PatchTower(hidden_size(model), num_deep, SCALES[mutual])
        encoded = [list(tower.encode(mx.array(each.pixels[None])))[-1][0] for each in images]
        features = mx.concatenate(encoded).reshape(len(where), 1 + num_deep, -1)

        def put(output: mx.array) -> mx.array:
            output[0, mx.array(where)] = features[:, 0].astype(output.dtype)
            return output

        def add(output: mx.array, layer: int) -> mx.array:
            output[0, mx.array(where)] += features[:, 1 + layer].astype(output.dtype)
            return output

        change_output(embedding_of(model), len(prompt), put)
        for layer in range(num_deep if without != "deepstack" else 0):
            change_output(model.layers[layer], len(prompt), partial(add, layer=layer))
    if axes is not None:
        use_axes(model, axes, prompt, images, has_delta=without != "delta")
    caches = make_prompt_cache(model)
    if mutual != "none" and without != "masks":
        for cache in caches:
            use_masks(cache, len(prompt), images, mutual)
    return greedy_answer(model, caches, ids, num_tokens).tokens


def use_masks(cache: Any, length: int, images: Sequence[PromptImage], mutual: Mutual) -> None:
    """Of a prompt's only pass: a query sees a key before it, within the window, or one of its own image."""
    base = cache.make_mask

    def make_mask(num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if num_tokens != length:
            return base(num_tokens, return_array=return_array, window_size=window_size)
        together = images if mutual == "all" or window_size is not None else ()
        return mx.array(
            [
                [
                    (key <= query and (window_size is None or query - key < window_size))
                    or any(key in each.positions and query in each.positions for each in together)
                    for key in range(length)
                ]
                for query in range(length)
            ]
        )

    cache.make_mask = make_mask


def change_output(module: Any, length: int, change: Callable[[mx.array], mx.array]) -> None:
    """Of calls with as many tokens as the prompt has."""
    base: Any = type(module)

    def run(self: Any, x: mx.array, *args: Any, **more: Any) -> mx.array:
        output: mx.array = base.__call__(self, x, *args, **more)
        return change(output) if x.shape[1] == length else output

    module.__class__ = type(base.__name__, (base,), {"__call__": run})


def use_axes(model: Any, axes: Axes, prompt: Sequence[int], images: Sequence[PromptImage], has_delta: bool) -> None:
    """Rotate by cosines and sines that are written out for each position and frequency."""
    positions: list[tuple[int, int, int]] = []
    following = 0
    for i in range(len(prompt)):
        shown = next((each for each in images if i in each.positions), None)
        if shown is None:
            positions.append((following,) * 3)
            following += 1
        else:
            row, column = divmod(shown.positions.index(i), shown.pixels.shape[1] // PATCH)
            positions.append((following, following + row, following + column))
            if i == shown.positions[-1]:
                following = max(max(positions[j]) for j in shown.positions) + 1
    positions += [((following if has_delta else len(prompt)) + i,) * 3 for i in range(100)]
    for module in model.modules():
        if "rope" in module:
            half = module.rope.dims // 2
            base = getattr(module.rope, "base", None)
            assert base is not None
            chosen = axes.of_frequencies(half)
            angles = np.array([[at[chosen[i]] * base ** (-i / half) for i in range(half)] for at in positions])
            rotate_by(module.rope, mx.array(np.cos(angles), mx.float32), mx.array(np.sin(angles), mx.float32))


def rotate_by(rope: Any, cosines: mx.array, sines: mx.array) -> None:
    def rotate(self: Any, x: mx.array, offset: int = 0) -> mx.array:
        half, length = self.dims // 2, x.shape[2]
        c, s = cosines[offset : offset + length], sines[offset : offset + length]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

    rope.__class__ = type("Rotating", (type(rope),), {"__call__": rotate})
