"""Sizes and tokens of images in the prompts of Pixtral and Mistral 3."""

from __future__ import annotations

import pytest

from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.image import ImageFormat

IMAGE, ROW_END, END = 10, 12, 13


def form(side: int, *longest: int) -> ImageFormat:
    width, height = longest if len(longest) == 2 else 2 * longest
    return PixtralFormat(placeholder=IMAGE, row_end=ROW_END, end=END, longest=(width, height), side=side)


@pytest.mark.parametrize(
    ("side", "longest", "size", "taken"),
    [
        (28, 1540, (1, 1), (28, 28)),
        (28, 1540, (28, 28), (28, 28)),
        (28, 1540, (29, 28), (56, 28)),
        (28, 1540, (640, 480), (644, 504)),
        (28, 1540, (1541, 1000), (1540, 1008)),
        (28, 1540, (3000, 2000), (1540, 1036)),
        (28, 1540, (4032, 3024), (1540, 1176)),
        (28, 1540, (100, 5000), (56, 1540)),
        (16, 1024, (1024, 1024), (1024, 1024)),
        (16, 1024, (1025, 1025), (1024, 1024)),
        (16, 1024, (1920, 1080), (1024, 576)),
        (16, 1024, (333, 777), (336, 784)),
        (16, 128, (300, 200), (128, 96)),
    ],
)
def test_sizes_are_those_of_transformers(
    side: int, longest: int, size: tuple[int, int], taken: tuple[int, int]
) -> None:
    """The values are of `get_resize_output_image_size` in transformers 5.24."""
    assert form(side, longest).size(*size) == taken


def test_an_image_that_is_thinner_than_a_pixel_when_reduced_keeps_one_part() -> None:
    """transformers refuses it."""
    assert form(28, 1540).size(1, 5000) == (28, 1540)
    assert form(28, 1540).size(5000, 1) == (1540, 28)


def test_a_size_that_was_returned_stays() -> None:
    for longest in (100, 1540):
        for width in range(1, 2000, 97):
            size = form(28, longest).size(width, 2000 - width)
            if max(size) <= longest:
                assert form(28, longest).size(*size) == size


def test_width_and_height_may_have_limits_of_their_own() -> None:
    assert form(16, 64, 1024).size(128, 512) == (
        64,
        256,
    )
    assert form(16, 1024, 64).size(128, 512) == (
        16,
        64,
    )


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (28, 28, [IMAGE, END]),
        (84, 28, [IMAGE, IMAGE, IMAGE, END]),
        (28, 84, [IMAGE, ROW_END, IMAGE, ROW_END, IMAGE, END]),
        (84, 56, [IMAGE, IMAGE, IMAGE, ROW_END, IMAGE, IMAGE, IMAGE, END]),
    ],
)
def test_each_row_of_parts_ends_with_a_token(width: int, height: int, tokens: list[int]) -> None:
    assert form(28, 1540).tokens(width, height) == tokens


def test_the_placeholder_is_what_the_template_writes() -> None:
    assert form(28, 1540).template_token == form(28, 1540).placeholder == IMAGE


def test_settings_differ_if_pixels_do() -> None:
    forms = [
        form(28, 1540),
        form(28, 1024),
        form(16, 1540),
        form(28, 1540, 1024),
    ]
    assert len({each.settings for each in forms}) == len(forms)
    assert (
        form(28, 1540).settings
        == PixtralFormat(placeholder=1, row_end=2, end=3, longest=(1540, 1540), side=28).settings
    )
