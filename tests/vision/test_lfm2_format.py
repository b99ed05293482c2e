"""Sizes and tokens of images in the prompts of LFM2-VL."""

from __future__ import annotations

import pytest

from mlxpaged.vision.image import ImageFormat
from mlxpaged.vision.lfm2_format import Lfm2Format

IMAGE, START, END = 10, 11, 12


def form(side: int = 32, least: int = 64, most: int = 256) -> ImageFormat:
    return Lfm2Format(placeholder=IMAGE, around=(START, END), side=side, least=least, most=most)


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((10, 7), (320, 224)),
        ((32, 32), (256, 256)),
        ((256, 256), (256, 256)),
        ((512, 512), (512, 512)),
        ((640, 480), (576, 416)),
        ((1000, 333), (864, 288)),
        ((3000, 2000), (608, 416)),
        ((1920, 1080), (672, 384)),
        ((1080, 1920), (384, 672)),
        ((8, 1500), (32, 3520)),
        ((8, 6000), (32, 6016)),
        ((82, 16384), (32, 7232)),
        ((48, 80), (224, 352)),
    ],
)
def test_sizes_are_those_of_transformers(size: tuple[int, int], taken: tuple[int, int]) -> None:
    """The values are of `smart_resize` of Lfm2VlImageProcessor in transformers 5.24."""
    assert form().size(*size) == taken
    assert form().size(*taken) == taken


def test_an_image_has_as_many_parts_as_the_limits_say() -> None:
    for width in range(1, 3000, 97):
        for height in range(max(1, width // 200), 3000, 89):
            if width / 200 <= height <= width * 200:
                size = form().size(width, height)
                rows, columns = form().grid(*size)
                assert 64 <= rows * columns <= 256


@pytest.mark.parametrize(("width", "height"), [(32, 32), (96, 32), (64, 96)])
def test_parts_stand_between_two_tokens(width: int, height: int) -> None:
    rows, columns = form().grid(width, height)
    assert (columns * 32, rows * 32) == (width, height)
    parts = [IMAGE] * (rows * columns)
    assert form().tokens(width, height) == [START, *parts, END]
    assert Lfm2Format(placeholder=IMAGE, around=None, side=32, least=64, most=256).tokens(width, height) == parts


def test_the_placeholder_is_what_the_template_writes() -> None:
    assert form().template_token == form().placeholder == IMAGE


def test_settings_differ_if_pixels_do() -> None:
    forms = [form(), form(side=28), form(least=1), form(most=128)]
    assert len({each.settings for each in forms}) == len(forms)
    assert form().settings == Lfm2Format(placeholder=1, around=None, side=32, least=64, most=256).settings
