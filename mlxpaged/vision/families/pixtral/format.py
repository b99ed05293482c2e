"""How the prompts of Pixtral and Mistral 3 show an image."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True, kw_only=True)
class PixtralFormat(PartsFormat):
    """A row of placeholders for each row of the image's parts, with a token after each row.

    row_end: the token after each row but the last. end: the one after the last. longest: the greatest width and height
    in pixels.
    """

    row_end: int
    end: int
    longest: tuple[int, int]

    @property
    def settings(self) -> bytes:
        return f"pixtral {self.longest} {self.side}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size at which the tower takes an image: a larger one is reduced to `longest`, then each side is
        rounded up to whole parts."""
        ratio = max(1, width / self.longest[0], height / self.longest[1])
        return self.whole_parts(int(width / ratio), int(height / ratio))

    def tokens(self, width: int, height: int) -> list[int]:
        rows, columns = self.grid(width, height)
        row = [*[self.placeholder] * columns, self.row_end]
        return [*(row * rows)[:-1], self.end]
