"""How the prompts of LFM2-VL show a picture.

The models can also split a large picture into tiles, with a thumbnail of the whole after them. A `PictureFormat` has
one size and one grid for a picture, so each picture is shown as the models show those that need no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.picture import Resampling


@dataclass(frozen=True)
class Lfm2Format:
    """A placeholder for each square part of the picture, row by row, between two tokens.

    around: the tokens before and after; None if the prompts have none. side: of a part, in pixels. least, most: parts
    of a picture.
    """

    placeholder: int
    around: tuple[int, int] | None
    side: int
    least: int
    most: int
    resampling: Resampling = "BILINEAR"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def template_token(self) -> int:
        return self.placeholder

    @property
    def settings(self) -> bytes:
        return f"lfm2 {self.side} {self.least} {self.most} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes a picture: each side is rounded to whole parts, of a picture with
        about the same sides that has from `least` to `most` parts (smart_resize of transformers)."""
        side = self.side
        least, most = self.least * side**2, self.most * side**2
        rounded = [max(side, round(length / side) * side) for length in (width, height)]
        if rounded[0] * rounded[1] > most:
            factor = math.sqrt(width * height / most)
            rounded = [max(side, math.floor(length / factor / side) * side) for length in (width, height)]
        elif rounded[0] * rounded[1] < least:
            factor = math.sqrt(least / (width * height))
            rounded = [math.ceil(length * factor / side) * side for length in (width, height)]
        return rounded[0], rounded[1]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> list[int]:
        parts = [self.placeholder] * (width // self.side * (height // self.side))
        return parts if self.around is None else [self.around[0], *parts, self.around[1]]
