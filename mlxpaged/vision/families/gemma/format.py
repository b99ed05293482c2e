"""How the prompts of Gemma 3 and Gemma 4 show an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxpaged.vision.image import Resampling
from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True)
class Gemma3Format:
    """As many placeholders for each image, between two tokens, with an empty line before and after.

    side: of an image, in pixels. rows: of placeholders, and columns. newlines: the token of two newlines. joins: the
    tokens of more newlines, by those that they are joined of. shown_as_placeholder: whether the template writes
    `placeholder` instead of `start`.
    """

    start: int
    placeholder: int
    end: int
    newlines: int
    side: int
    rows: int
    joins: Mapping[tuple[int, int], int] = field(default_factory=dict)
    resampling: Resampling = "BILINEAR"
    shown_as_placeholder: bool = False

    @property
    def template_token(self) -> int:
        return self.placeholder if self.shown_as_placeholder else self.start

    @property
    def settings(self) -> bytes:
        return f"gemma3 {self.side} {self.rows} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.side, self.side

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self.rows, self.rows

    def tokens(self, width: int, height: int) -> list[int]:
        return [self.newlines, self.start, *[self.placeholder] * self.rows**2, self.end, self.newlines]


@dataclass(frozen=True, kw_only=True)
class Gemma4Format(PartsFormat):
    """A placeholder for each square part of the image, row by row, between two tokens. most: parts of an image."""

    start: int
    end: int
    most: int

    @property
    def settings(self) -> bytes:
        return f"gemma4 {self.side} {self.most} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes an image: it is enlarged or reduced to `most` parts with about the
        same sides, then each side is rounded down to whole parts (get_aspect_ratio_preserving_size of transformers).
        An image that is thinner than a part then is one part wide, and its length in parts is its ratio."""
        factor = math.sqrt(self.most * self.side**2 / (height * width))
        columns, rows = (math.floor(factor * length / self.side) for length in (width, height))
        if rows == 0:
            rows, columns = 1, min(width // height, self.most)
        elif columns == 0:
            rows, columns = min(height // width, self.most), 1
        return columns * self.side, rows * self.side

    def tokens(self, width: int, height: int) -> list[int]:
        return [self.start, *super().tokens(width, height), self.end]
