"""How the prompts of Kimi-VL and Kimi K2.5 show an image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxpaged.vision.parts_format import PartsFormat

PATCHES = 511
"""The most of a side in Kimi-VL, whose own code refuses more (image_processing_kimi_vl.py)."""


@dataclass(frozen=True, kw_only=True)
class KimiFormat(PartsFormat):
    """merge: patches of a part's side. most, longest: patches of an image and of a side, before its sides are rounded
    up."""

    merge: int
    most: int
    longest: int = PATCHES

    @property
    def settings(self) -> bytes:
        return f"kimi {self.side // self.merge} {self.merge} {self.most} {self.longest}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes an image: one with too many patches is reduced, then each side is
        rounded up to whole parts. The models' own code puts black pixels there; here the image is stretched."""
        patch = self.side // self.merge
        patches = (width // patch) * (height // patch)
        longest = self.longest // self.merge * self.side
        scale = min(1.0, math.sqrt(self.most / max(1, patches)), longest / max(width, height))
        return self.whole_parts(int(width * scale), int(height * scale))
