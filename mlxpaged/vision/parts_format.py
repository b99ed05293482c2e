"""What the formats of images have in common in which each square part of an image is a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.image import Resampling


@dataclass(frozen=True, kw_only=True)
class PartsFormat:
    """A placeholder for each square part of the image, row by row.

    side: of a part, in pixels. around: the tokens before and after all of them; None if there are none, or if the
    template writes them.
    """

    placeholder: int
    side: int
    around: tuple[int, int] | None = None
    resampling: Resampling = "BICUBIC"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def template_token(self) -> int:
        return self.placeholder

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> list[int]:
        return self.enclosed(self.parts(width, height))

    def parts(self, width: int, height: int) -> list[int]:
        return [self.placeholder] * (width // self.side * (height // self.side))

    def enclosed(self, tokens: list[int]) -> list[int]:
        return tokens if self.around is None else [self.around[0], *tokens, self.around[1]]

    def whole_parts(self, width: float, height: float) -> tuple[int, int]:
        """Returns the sides in pixels, each rounded up to whole parts. An image keeps at least one, however thin."""
        columns, rows = (max(1, math.ceil(length / self.side)) for length in (width, height))
        return columns * self.side, rows * self.side

    def between(self, width: int, height: int, least: int, most: int, thinnest: int = 0) -> tuple[int, int]:
        """Returns the sides in pixels, each rounded to whole parts, of an image with about the same sides that has
        from `least` to `most` pixels (smart_resize of transformers). thinnest: the least that a side is rounded to
        before the pixels are counted; a very thin image has no pixels then, which are too few."""
        side = self.side
        rounded = [max(thinnest, round(length / side) * side) for length in (width, height)]
        if rounded[0] * rounded[1] > most:
            factor = math.sqrt(width * height / most)
            rounded = [max(side, math.floor(length / factor / side) * side) for length in (width, height)]
        elif rounded[0] * rounded[1] < least:
            factor = math.sqrt(least / (width * height))
            rounded = [math.ceil(length * factor / side) * side for length in (width, height)]
        return rounded[0], rounded[1]
