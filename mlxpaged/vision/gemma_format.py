"""How the prompts of Gemma 3 show a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxpaged.vision.picture import Resampling


@dataclass(frozen=True)
class Gemma3Format:
    """As many placeholders for each picture, between two tokens, with an empty line before and after.

    The template writes `start`. side: of a picture, in pixels. rows: of placeholders, and columns. newlines: the token
    of two newlines. joins: the tokens of more newlines, by those that they are joined of.
    """

    start: int
    placeholder: int
    end: int
    newlines: int
    side: int
    rows: int
    joins: Mapping[tuple[int, int], int] = field(default_factory=dict)
    resampling: Resampling = "BILINEAR"

    @property
    def template_token(self) -> int:
        return self.start

    @property
    def settings(self) -> bytes:
        return f"gemma3 {self.side} {self.rows} {self.resampling}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.side, self.side

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self.rows, self.rows

    def tokens(self, width: int, height: int) -> list[int]:
        return [self.newlines, self.start, *[self.placeholder] * self.rows**2, self.end, self.newlines]
