"""How the prompts of Qwen's models show an image."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpaged.vision.parts_format import PartsFormat


@dataclass(frozen=True, kw_only=True)
class QwenFormat(PartsFormat):
    """least, most: pixels of an image."""

    least: int
    most: int

    @property
    def settings(self) -> bytes:
        return f"qwen {self.side} {self.least} {self.most}".encode()

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.between(width, height, self.least, self.most)
