"""The probe of a model that sees: a made-up image goes through its tower, and a prompt with it through its layers.

A tower must give an image the same features alone and beside others. The layers must give the same logits in chunks,
which end within the image if they may, as in one pass with mlx-lm's own caches. And another image must change them:
a model may not use the embedding in which the features are put.

The image is as small as the tower takes it, see `Vision.small`. One of Gemma 3's own size would take its tower 5 TFLOP
and a text model of 27 billion parameters 14, each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.core.step import Row
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.checks.reference import differences
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layers import LayerSpec, kv_layers, mutual
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage
from mlxpaged.vision.embedding import FeatureRows, embedding_of
from mlxpaged.vision.image import ImageFormat, PromptImage
from mlxpaged.vision.positions import Positions, positions_of
from mlxpaged.vision.tower import Vision

SIZE = (96, 64)
"""Width and height of the image before the model's format has its way."""
TEXT = [5, 17, 9, 40, 33]
CHUNKS = (4, 3, 7, 1, 5)
BLOCK_SIZE = 8
SEQUENCE = 0

FEATURES_ALLOWED = {mx.float32: 1e-3}
LOGITS_ALLOWED = {mx.float32: 1e-2}
"""Differences that rounding explains, as `differences` measures them, by the type of the numbers."""
HALF_ALLOWED = 0.1
OTHER_IMAGE = 1e-4
"""Another image changes the logits by more."""


def check_vision(model: Module, specs: Sequence[LayerSpec], vision: Vision, turns: Turns | None = None) -> None:
    """Raises UnsupportedModelError with the reason for which the model cannot be served with images. turns: of other
    models."""
    turns = turns or Turns()
    turns.begin(Stage.CHECKING_IMAGES)
    if vision.mutual != "none" and (reason := cannot_be_whole(specs, places_of(vision.format))):
        raise UnsupportedModelError(reason)
    if vision.small is not None:  # the rows of an image of the usual size are counted, and not computed
        width, height = vision.format.size(*SIZE)
        *_, unused = vision.tower.encode(mx.zeros((1, height, width, 3), mx.uint8))
        require_rows(unused, vision.format, 1)
    form = vision.small or vision.format
    width, height = form.size(*SIZE)
    pixels = mx.array(np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8))
    alone, both = encoded(vision, pixels[:1], turns), encoded(vision, pixels, turns)
    require_rows(alone, form, 1)
    require_rows(both, form, 2)
    allowed = FEATURES_ALLOWED.get(alone.dtype, HALF_ALLOWED)
    worst = float(differences(both[0], alone[0].astype(mx.float32)).max())
    if not worst <= allowed:
        raise UnsupportedModelError(f"its tower gives an image other features beside another one, by {worst:.2%}")
    prompt = TEXT + form.tokens(width, height) + TEXT
    where = [len(TEXT) + place for place in places_of(form)]
    shown_at = set(where)
    ids = [0 if position in shown_at else token for position, token in enumerate(prompt)]
    require_embedded(model, ids)
    shown = Shown(ids, where, alone[0])
    if vision.axes is not None:
        image = PromptImage(b"", np.array(pixels[0]), tuple(where))
        shown = shown._replace(positions=positions_of(len(ids), [(image, form.grid(width, height))]))
    expected = whole(model, vision, shown, turns)
    other = whole(model, vision, shown._replace(features=both[1]), turns)
    paged = mx.concatenate(list(in_chunks(model, specs, vision, shown, turns)))
    allowed = LOGITS_ALLOWED.get(expected.dtype, HALF_ALLOWED)
    expected = expected.astype(mx.float32)
    worst = float(differences(paged, expected).max())
    if not worst <= allowed:
        raise UnsupportedModelError(f"the paged batch does not reproduce its logits for an image, by {worst:.2%}")
    if not float(differences(other[-1:], expected[-1:]).max()) > OTHER_IMAGE:
        raise UnsupportedModelError("its logits do not depend on an image's features")


def require_embedded(model: Module, ids: Sequence[int]) -> None:
    """Raises UnsupportedModelError if a token has no embedding: MLX would read beyond the weights. config.json names
    tokens of images by their ids."""
    embedding: Any = embedding_of(model)
    num_tokens = len(embedding.weight)
    if not 0 <= min(ids) <= max(ids) < num_tokens:
        wrong = next(token for token in ids if not 0 <= token < num_tokens)
        raise UnsupportedModelError(f"its images have token {wrong}, and its embedding has {num_tokens:,} tokens")


def places_of(form: ImageFormat) -> list[int]:
    """Where the tokens of the made-up image have its rows."""
    tokens = form.tokens(*form.size(*SIZE))
    return [place for place, token in enumerate(tokens) if token == form.placeholder]


def require_rows(features: mx.array, form: ImageFormat, num_images: int) -> None:
    """Raises UnsupportedModelError if images have other rows than their tokens in a prompt."""
    count = len(places_of(form))
    if features.shape[:2] != (num_images, count):
        raise UnsupportedModelError(f"its tower makes {features.shape[1]} rows of an image, and its prompt has {count}")


class Shown(NamedTuple):
    """A prompt with an image: token ids[T], the places where[n] of its features[n, ...], and positions[3, T] if the
    model rotates by them."""

    ids: list[int]
    where: list[int]
    features: mx.array
    positions: Positions | None = None

    def put(self, rows: FeatureRows, start: int, end: int) -> None:
        """Makes the tokens from `start` to `end` those of the running step."""
        within = [row for row, position in enumerate(self.where) if start <= position < end]
        if within:
            rows.where = mx.array([self.where[row] - start for row in within])
            rows.features = self.features[mx.array(within)]
        if self.positions is not None:
            rows.positions = mx.array(self.positions[:, start:end])


def encoded(vision: Vision, pixels: mx.array, turns: Turns) -> mx.array:
    """The features [n, k, ...] of images."""
    for state in vision.tower.encode(pixels):
        mx.eval(state)
        turns.take()
    return state


def whole(model: Module, vision: Vision, shown: Shown, turns: Turns) -> mx.array:
    """The logits [T, V] by mlx-lm's own caches."""
    shown.put(vision.rows, 0, len(shown.ids))
    try:
        cache = make_prompt_cache(model)
        if vision.mutual != "none":
            let_look_ahead(cache, shown, vision.mutual == "all")
        logits: mx.array = model(mx.array([shown.ids]), cache=cache)[0]
        mx.eval(logits)
    finally:
        vision.rows.clear()
    turns.take()
    return logits


def cannot_be_whole(specs: Sequence[LayerSpec], where: Sequence[int]) -> str:
    """The reason for which the layers cannot show an image at these places whole; empty if they can."""
    if where[-1] + 1 - where[0] != len(where):
        return "the rows of its images do not follow one another"
    windows = [spec.window for spec in kv_layers(specs) if spec.window is not None]
    if any(window < len(where) for window in windows):
        return f"an image has {len(where)} rows, and a layer sees {min(windows)} keys"
    return ""


def let_look_ahead(cache: Sequence[Any], shown: Shown, everywhere: bool) -> None:
    """Makes mlx-lm's caches mask as the model was trained: rows of the image see one another, in layers with a window
    or everywhere."""
    is_row = mx.array([position in set(shown.where) for position in range(len(shown.ids))])
    together = is_row[:, None] & is_row

    def make_mask(num_tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        mask: mx.array = create_causal_mask(num_tokens, window_size=window_size)
        return mask | together if everywhere or window_size is not None else mask

    for each in cache:
        each.make_mask = make_mask


def in_chunks(
    model: Module, specs: Sequence[LayerSpec], vision: Vision, shown: Shown, turns: Turns
) -> Iterator[mx.array]:
    """Yields logits by paged caches, [n, V] for each chunk."""
    length = len(shown.ids)
    table = list(range(-(-length // BLOCK_SIZE)))
    caches = ModelCaches(mutual(specs, vision.mutual), len(table), BLOCK_SIZE)
    first, last = shown.where[0], shown.where[-1] + 1
    start, sizes = 0, itertools.cycle(CHUNKS)
    while start < length:
        end = min(length, start + next(sizes))
        spans: dict[int, list[tuple[int, int]]] = {}
        if vision.mutual != "none" and start < last and end > first:
            end, spans = max(end, last), {0: [(first, last)]}
        shown.put(vision.rows, start, end)
        try:
            meta = AttentionMetadata.build([end - start], [end], [table], BLOCK_SIZE, spans)
            row = Row(SEQUENCE, start, range(start, end))
            logits = caches.run(model, mx.array(shown.ids[start:end]), [meta], [row], [SEQUENCE])
            mx.eval(logits, caches.arrays)
        finally:
            vision.rows.clear()
        turns.take()
        yield logits[:, 0]
        start = end
