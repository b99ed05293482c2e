"""A tiny text model with a made-up tower, its pictures and prompts, and its answers by mlx-lm alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.vision.embedding import embedding_of, put_features
from mlxpaged.vision.picture import Picture
from mlxpaged.vision.tower import Vision
from tests.answers import greedy_answer

PATCH = 8
PLACEHOLDER = 3


class PatchFormat:
    """A picture is one token for each patch, without others."""

    template_token = placeholder = PLACEHOLDER
    settings = b"patches"

    def size(self, width: int, height: int) -> tuple[int, int]:
        return max(1, width // PATCH) * PATCH, max(1, height // PATCH) * PATCH

    def tokens(self, width: int, height: int) -> list[int]:
        return [PLACEHOLDER] * (width // PATCH * height // PATCH)


class PatchTower:
    """Features of a patch are a projection of its values. calls: the shapes of what was encoded. faulty: a value of the
    first pixel that cannot be encoded."""

    def __init__(self, width: int, parts: int = 3) -> None:
        self.weights = mx.random.normal((PATCH * PATCH * 3, width), key=mx.random.key(7)) * 0.01
        self.nbytes = self.weights.nbytes
        self.parts = parts
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
            raise RuntimeError("this picture cannot be encoded")
        self.steps += 1
        yield state @ self.weights


def picture(seed: int, width: int, height: int) -> Picture:
    """One without positions."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture(hashlib.blake2b(pixels.tobytes(), digest_size=16).digest(), pixels, ())


def shown(*parts: Sequence[int] | Picture) -> tuple[list[int], tuple[Picture, ...]]:
    """A prompt of tokens and pictures in this order: its tokens, and its pictures with their positions."""
    prompt: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, Picture):
            height, width, _ = part.pixels.shape
            tokens = PatchFormat().tokens(width, height)
            positions = tuple(range(len(prompt), len(prompt) + len(tokens)))
            pictures.append(dataclasses.replace(part, positions=positions))
            prompt += tokens
        else:
            prompt += part
    return prompt, tuple(pictures)


def load_seeing(path: Path) -> tuple[ServedModel, PatchTower]:
    served = load_model(str(path))
    embedding = embedding_of(served.model)
    assert embedding is not None
    tower = PatchTower(embedding(mx.array([[0]])).shape[-1])
    vision = Vision(PatchFormat(), tower)
    put_features(embedding, vision.rows)
    return dataclasses.replace(served, vision=vision), tower


def features_of(pictures: Sequence[Picture], width: int) -> mx.array:
    """[n, D], each picture encoded alone."""
    tower = PatchTower(width)
    return mx.concatenate([list(tower.encode(mx.array(each.pixels[None])))[-1][0] for each in pictures])


def expected_answer(path: Path, prompt: Sequence[int], pictures: Sequence[Picture], num_tokens: int = 16) -> list[int]:
    """By mlx-lm's model alone, with the features in place of its embeddings, in one pass over the prompt."""
    model, _ = load_plain_model(path)
    embedding = embedding_of(model)
    assert embedding is not None
    where = [position for each in pictures for position in each.positions]
    ids = [0 if i in set(where) else token for i, token in enumerate(prompt)]
    base: Any = type(embedding)

    def embed(self: Any, tokens: mx.array) -> mx.array:
        embedded = base.__call__(self, tokens)
        if pictures and tokens.shape == (1, len(prompt)):
            embedded[0, mx.array(where)] = features_of(pictures, embedded.shape[-1]).astype(embedded.dtype)
        return embedded

    embedding.__class__ = type(base.__name__, (base,), {"__call__": embed})
    return greedy_answer(model, make_prompt_cache(model), ids, num_tokens).tokens
