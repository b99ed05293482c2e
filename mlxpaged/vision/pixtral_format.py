"""How the prompts of Pixtral and Mistral 3 show a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mlxpaged.vision.picture import Resampling


@dataclass(frozen=True)
class PixtralFormat:
    """A row of placeholders for each row of the picture's parts, with a token after each row.

    placeholder: stands for a part. row_end: the token after each row but the last. end: the one after the last.
    longest: the greatest width and height in pixels. side: of a part, which is a square, in pixels.
    """

    placeholder: int
    row_end: int
    end: int
    longest: tuple[int, int]
    side: int
    resampling: ClassVar[Resampling] = "BICUBIC"
    joins: ClassVar[Mapping[tuple[int, int], int]] = {}

    @property
    def template_token(self) -> int:
        return self.placeholder

    @property
    def settings(self) -> bytes:
        return f"pixtral {self.longest} {self.side}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes a picture: a larger one is reduced to `longest`, then each side is
        rounded up to whole parts. A picture keeps at least one, however thin it is."""
        ratio = max(width / self.longest[0], height / self.longest[1])
        if ratio > 1:
            width, height = int(width / ratio), int(height / ratio)
        return max(1, -(-width // self.side)) * self.side, max(1, -(-height // self.side)) * self.side

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self.side, width // self.side

    def tokens(self, width: int, height: int) -> list[int]:
        row = [*[self.placeholder] * (width // self.side), self.row_end]
        return [*(row * (height // self.side))[:-1], self.end]
