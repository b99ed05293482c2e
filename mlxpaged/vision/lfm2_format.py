"""How the prompts of LFM2-VL show an image.

The models can also split a large image into tiles, with a thumbnail of the whole after them. A `ImageFormat` has
one size and one grid for an image, so each image is shown as the models show those that need no tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxpaged.vision.image import Resampling
from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True, kw_only=True)
class Lfm2Format(PartsFormat):
    """A placeholder for each square part of the image, row by row, between two tokens.

    around: the tokens before and after; None if the prompts have none. least, most: parts of an image.
    """

    around: tuple[int, int] | None
    least: int
    most: int
    resampling: Resampling = "BILINEAR"

    @property
    def settings(self) -> bytes:
        return f"lfm2 {self.side} {self.least} {self.most} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.between(width, height, self.least * self.side**2, self.most * self.side**2, thinnest=self.side)

    def tokens(self, width: int, height: int) -> list[int]:
        parts = super().tokens(width, height)
        return parts if self.around is None else [self.around[0], *parts, self.around[1]]
