"""What a model that sees has beside its text model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_reduce

from mlxpaged.vision.embedding import FeatureRows
from mlxpaged.vision.image import ImageFormat
from mlxpaged.vision.positions import Axes


class Tower(Module, ABC):
    """Encodes images: a vision tower and the projection to the width of the text model's embeddings. library: the
    distribution that computes it, if its code is not here."""

    library = ""

    def __init__(self) -> None:
        super().__init__()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        total: int = tree_reduce(lambda total, array: total + int(array.nbytes), self.parameters(), 0)
        return total

    @abstractmethod
    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        """Yields the state after each part of the work, which is about a block's, and at the end the features
        [n, k, D], k for each image. Nothing is evaluated: the caller decides how many parts it computes at once.

        pixels: uint8 [n, H, W, 3], of n images of one size, which `ImageFormat.size` has returned.
        """


@dataclass(frozen=True)
class Vision:
    """format: how its prompts show images. axes: how its rotary embedding sees them; None if as text. num_deep: the
    first layers that add features of their own to their outputs; a row of features is then [1 + num_deep, D]. mutual:
    the layers in which the tokens of an image see one another, those after themselves too: those with a window, or
    all. small: how the probe shows an image, if the tower also takes smaller ones than `format` allows. rows: of the
    running step."""

    format: ImageFormat
    tower: Tower
    axes: Axes | None = None
    num_deep: int = 0
    mutual: Literal["none", "windows", "all"] = "none"
    small: ImageFormat | None = None
    rows: FeatureRows = field(default_factory=FeatureRows)
