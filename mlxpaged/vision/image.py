"""An image of a request, between the client's bytes and the features that a tower makes of it. It needs no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

LARGEST = (16_384, 16_384)
"""Width and height of an image for which `ImageFormat.size` gives the largest that the tower takes."""

Resampling = Literal["BICUBIC", "BILINEAR", "LANCZOS"]
"""The filter for images of another size, by its name in Pillow."""


@dataclass(frozen=True)
class PromptImage:
    """An image in a prompt, as the engine takes it.

    digest: 16 bytes, a hash of all that its features depend on: the client's bytes, and how they were read.
    pixels: [H, W, 3], RGB, at the size that the tower takes.
    positions: of its placeholders in the prompt, in order, one for each row of features.
    """

    digest: bytes
    pixels: Pixels
    positions: tuple[int, ...]


class ImageFormat(Protocol):
    """How a model's prompts show an image. All of it follows from the model's configuration."""

    @property
    def template_token(self) -> int:
        """The token that the chat template writes for an image."""
        ...

    @property
    def placeholder(self) -> int:
        """The token of `tokens` that stands for one row of features."""
        ...

    @property
    def settings(self) -> bytes:
        """What an image's pixels depend on beside the client's bytes. It is a part of a digest."""
        ...

    @property
    def resampling(self) -> Resampling:
        """How an image gets the size that the tower takes."""
        ...

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        """The token that the tokenizer has for two tokens in a row. A prompt has it if one of them is the last or first
        of `tokens`, and the other the text's."""
        ...

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height at which the tower takes an image of this width and height."""
        ...

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns how many rows and columns of placeholders `tokens` has for an image of this size."""
        ...

    def tokens(self, width: int, height: int) -> list[int]:
        """Returns the tokens that a prompt has in place of `template_token`, for an image of a size that `size` has
        returned."""
        ...
