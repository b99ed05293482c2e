"""How the prompts of Muse Glimmer show an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True, kw_only=True)
class MuseFormat(PartsFormat):
    """most: parts of an image."""

    most: int

    @property
    def settings(self) -> bytes:
        return f"muse {self.side} {self.most} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the sides in pixels of whole parts: of those one fewer and one more than the image has, or would
        have if it were reduced to `most`, the pair with the ratio that is nearest to its own, and of two such the
        smaller one (smart_resize of transformers, where it is any of them)."""
        scale = min(1.0, math.sqrt(self.most * self.side**2 / (width * height)))
        columns, rows = (
            {max(1, math.floor(length * scale / self.side)), math.ceil(length * scale / self.side)}
            for length in (width, height)
        )
        each = [(across, down) for across in sorted(columns) for down in sorted(rows) if across * down <= self.most]
        if not each:  # a thin image, whose longer side alone has too many
            across = min(min(columns), self.most)
            each = [(across, min(min(rows), self.most // across))]
        across, down = min(each, key=lambda pair: abs(pair[1] / pair[0] - height / width))
        return across * self.side, down * self.side
