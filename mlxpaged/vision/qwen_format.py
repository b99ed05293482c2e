"""How the prompts of Qwen's models show a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.picture import Resampling


@dataclass(frozen=True)
class QwenFormat:
    """A placeholder for each square part of the picture, row by row. The template writes what comes before and after.

    side: of a part, in pixels. least, most: pixels of a picture.
    """

    placeholder: int
    side: int
    least: int
    most: int
    resampling: ClassVar[Resampling] = "BICUBIC"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def template_token(self) -> int:
        return self.placeholder

    @property
    def settings(self) -> bytes:
        return f"qwen {self.side} {self.least} {self.most}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes a picture: each side is rounded to whole parts, of a picture with
        about the same sides that has from `least` to `most` pixels (smart_resize of transformers)."""
        side = self.side
        rounded = [round(length / side) * side for length in (width, height)]  # 0 pixels of a very thin one: too few
        if rounded[0] * rounded[1] > self.most:
            factor = math.sqrt(width * height / self.most)
            rounded = [max(side, math.floor(length / factor / side) * side) for length in (width, height)]
        elif rounded[0] * rounded[1] < self.least:
            factor = math.sqrt(self.least / (width * height))
            rounded = [math.ceil(length * factor / side) * side for length in (width, height)]
        return rounded[0], rounded[1]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> list[int]:
        return [self.placeholder] * (width // self.side * (height // self.side))
