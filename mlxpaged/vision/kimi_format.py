"""How the prompts of Kimi-VL show a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.picture import Resampling

PATCHES = 511
"""The most of a side: the models' own code refuses more (image_processing_kimi_vl.py)."""


@dataclass(frozen=True)
class KimiFormat:
    """A placeholder for each square part of the picture, row by row. The template writes what comes before and after.

    patch: side in pixels. merge: patches of a part's side. most: patches of a picture, before its sides are rounded up.
    """

    placeholder: int
    patch: int
    merge: int
    most: int
    resampling: ClassVar[Resampling] = "BICUBIC"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def template_token(self) -> int:
        return self.placeholder

    @property
    def settings(self) -> bytes:
        return f"kimi {self.patch} {self.merge} {self.most}".encode()

    @property
    def side(self) -> int:
        """Pixels of a part's side."""
        return self.patch * self.merge

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes a picture: one with too many patches is reduced, then each side is
        rounded up to whole parts. The models' own code puts black pixels there; here the picture is stretched."""
        patches = (width // self.patch) * (height // self.patch)
        longest = PATCHES // self.merge * self.side
        scale = min(1.0, math.sqrt(self.most / max(1, patches)), longest / max(width, height))
        width, height = int(width * scale), int(height * scale)
        return max(1, -(-width // self.side)) * self.side, max(1, -(-height // self.side)) * self.side

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> list[int]:
        return [self.placeholder] * (width // self.side * (height // self.side))
