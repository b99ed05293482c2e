"""How the prompts of Llama 4 show an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.image import Resampling


@dataclass(frozen=True)
class Llama4Format:
    """The tiles of an image, row by row, then the whole image as one tile more. A small image has that one only.

    template_token: what a template writes, and what comes before the whole image. start, end: of an image. across:
    the token between two tiles of a row. down: the token after each row of tiles. side: of a tile, in pixels. rows: of
    placeholders in a tile, and columns. most: tiles of an image, without the last.
    """

    template_token: int
    start: int
    placeholder: int
    end: int
    across: int
    down: int
    side: int
    rows: int
    most: int
    resampling: Resampling = "BILINEAR"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def settings(self) -> bytes:
        return f"llama4 {self.side} {self.rows} {self.most} {self.resampling}".encode()

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of the tiles that an image is put into: those for which it is enlarged least,
        or if it is too large for all of them, reduced least; then the fewest (get_best_fit of transformers)."""

        def rank(tiles: tuple[int, int]) -> tuple[bool, float, int]:
            scale = min(tiles[1] * self.side / width, tiles[0] * self.side / height)
            return scale < 1, abs(scale - 1), tiles[0] * tiles[1]

        each = range(1, self.most + 1)
        return min(((rows, columns) for rows in each for columns in each if rows * columns <= self.most), key=rank)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes an image, with the same sides: that of its tiles. An image is not
        enlarged to more than one tile's side."""
        rows, columns = self.tiles(width, height)
        right = min(max(width, self.side), columns * self.side)
        below = min(max(height, self.side), rows * self.side)
        if right * height < below * width:  # the width is reached first
            return right, max(1, height * right // width)
        return max(1, width * below // height), below

    def grid(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self.tiles(width, height)
        num_tiles = rows * columns + 1 if rows * columns > 1 else 1
        return num_tiles * self.rows, self.rows

    def tokens(self, width: int, height: int) -> list[int]:
        rows, columns = self.tiles(width, height)
        tile = [self.placeholder] * self.rows**2
        row = [*tile, *([self.across, *tile] * (columns - 1)), self.down]
        return [self.start, *(row * rows if rows * columns > 1 else []), self.template_token, *tile, self.end]
