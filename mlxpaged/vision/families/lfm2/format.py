"""How the prompts of LFM2-VL show an image.

A large image is split into tiles, with a thumbnail of the whole after them. It keeps its size until the tower makes
both of it: the tiles have other sides than the image, the thumbnail has the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxpaged.vision.image import Resampling
from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Where an image is split.

    side: of a tile, in pixels. least, most: tiles of an image. tolerance: an image with more pixels than so many times
    the most of one that is shown whole is split. pixels: the most that an image has before it is split. thumbnail:
    whether one follows the tiles. names: the token before each tile, by its row and column from 0. thumbnail_name: the
    token before the thumbnail. Neither is there if `Lfm2Format.around` is not.
    """

    side: int
    least: int
    most: int
    tolerance: float
    pixels: int
    thumbnail: bool
    names: Mapping[tuple[int, int], int] = field(default_factory=dict)
    thumbnail_name: int | None = None

    def kept(self, width: int, height: int) -> tuple[int, int]:
        """Returns the sides of an image with at most `pixels`."""
        scale = min(1.0, math.sqrt(self.pixels / (width * height)))
        return max(1, int(width * scale)), max(1, int(height * scale))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles for an image: those whose ratio is nearest to its own. Of several,
        the most tiles that have less than twice its pixels, or else the fewest (find_closest_aspect_ratio of
        transformers)."""
        each = range(1, self.most + 1)
        grids = [(rows, columns) for rows in each for columns in each if self.least <= rows * columns <= self.most]
        grids.sort(key=math.prod)
        distances = [abs(width / height - columns / rows) for rows, columns in grids]
        nearest = [grid for grid, distance in zip(grids, distances, strict=True) if distance == min(distances)]
        small = [grid for grid in nearest[1:] if math.prod(grid) * self.side**2 < 2 * width * height]
        return small[-1] if small else nearest[0]


@dataclass(frozen=True, kw_only=True)
class Lfm2Format(PartsFormat):
    """A placeholder for each square part of the image, row by row, between two tokens. In the same way for each tile
    and the thumbnail of an image that is split, with a token before each.

    least, most: parts of an image that is shown whole, or of a thumbnail. tiles: None if no image is split.
    """

    least: int
    most: int
    tiles: Tiles | None = None
    resampling: Resampling = "BILINEAR"

    @property
    def settings(self) -> bytes:
        tiles = self.tiles
        split = () if tiles is None else (tiles.side, tiles.least, tiles.most, tiles.tolerance, tiles.thumbnail)
        return f"lfm2 {self.side} {self.least} {self.most} {self.resampling} {split}".encode()

    def split(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns the rows and columns of tiles for an image of a size that `size` has returned; None if it is shown
        whole."""
        if self.tiles is None:
            return None
        pixels = math.prod(round(length / self.side) * self.side for length in (width, height))
        if pixels <= self.tiles.tolerance * self.most * self.side**2:
            return None
        return self.tiles.grid(width, height)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size of the whole image, or the one from which its tiles are made."""
        if self.tiles is not None:
            kept = self.tiles.kept(width, height)
            if self.split(*kept) is not None:
                return kept
        return self.whole_size(width, height)

    def whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size of an image without tiles, or of a thumbnail."""
        return self.between(width, height, self.least * self.side**2, self.most * self.side**2, thinnest=self.side)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The placeholders of tiles and a thumbnail count as one column."""
        if self.split(width, height) is None:
            return super().grid(width, height)
        return self.tokens(width, height).count(self.placeholder), 1

    def tokens(self, width: int, height: int) -> list[int]:
        tiles, split = self.tiles, self.split(width, height)
        if tiles is None or split is None:
            tokens = self.parts(width, height)
        else:
            tokens = []
            tile = self.parts(tiles.side, tiles.side)
            for row in range(split[0]):
                for column in range(split[1]):
                    name = tiles.names.get((row, column))
                    tokens += tile if name is None else [name, *tile]
            if tiles.thumbnail:
                tokens += [] if tiles.thumbnail_name is None else [tiles.thumbnail_name]
                tokens += self.parts(*self.whole_size(width, height))
        return self.enclosed(tokens)
