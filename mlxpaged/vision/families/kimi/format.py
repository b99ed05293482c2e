"""How the prompts of Kimi-VL, Kimi K2.5 and Kimi K3 show an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


@dataclass(frozen=True, kw_only=True)
class Kimi3Format(KimiFormat):
    """With the image's size in pixels before it, as a text. The size is the one that the tower sees.

    opening: the tokens before the width. times: the one between it and the height. content: the one before the
    placeholders. end: the one after them. numbers: tokens of one to three digits.
    """

    opening: tuple[int, ...]
    times: int
    content: int
    end: int
    numbers: Mapping[str, int]

    def tokens(self, width: int, height: int) -> list[int]:
        shown = self.parts(width, height)
        size = [*self.opening, *self.number(width), self.times, *self.number(height)]
        return [*size, self.content, *shown, self.end]

    def number(self, number: int) -> list[int]:
        """The tokens of a number. The tokenizer splits it after each third digit."""
        digits = str(number)
        tokens = []
        for start in range(0, len(digits), 3):
            group = digits[start : start + 3]
            tokens += [self.numbers[each] for each in ([group] if group in self.numbers else group)]
        return tokens
