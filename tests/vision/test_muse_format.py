"""Sizes and tokens of images in the prompts of Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxpaged.vision.families.muse.format import MuseFormat

FORM = MuseFormat(placeholder=10, side=28, around=(11, 12), most=4096, resampling="LANCZOS")


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((1, 1), (28, 28)),
        ((28, 28), (28, 28)),
        ((640, 480), (644, 476)),
        ((896, 896), (896, 896)),
        ((1920, 1080), (1932, 1092)),
        ((3000, 2000), (2184, 1456)),
        ((4032, 3024), (2044, 1540)),
        ((20, 2000), (28, 2016)),
        ((5000, 30), (4984, 28)),
    ],
)
def test_sizes_are_those_of_the_models_own_code(size: tuple[int, int], taken: tuple[int, int]) -> None:
    """The values are of `smart_resize` of transformers' MuseGlimmerImageProcessor."""
    assert FORM.size(*size) == taken


@pytest.mark.parametrize("size", [(5000, 3), (3, 5000), (400, 300)])
def test_no_image_has_more_parts_than_are_allowed(size: tuple[int, int]) -> None:
    """There, a thin image has as many as its longer side."""
    rows, columns = FORM.grid(*replace(FORM, most=4).size(*size))
    assert 1 <= rows * columns <= 4


def test_the_parts_are_between_two_tokens() -> None:
    assert FORM.tokens(84, 56) == [11, *[10] * 6, 12]
    assert FORM.template_token == 10


def test_settings_differ_if_pixels_do() -> None:
    forms = [FORM, replace(FORM, most=9), replace(FORM, side=14), replace(FORM, resampling="BICUBIC")]
    assert len({each.settings for each in forms}) == len(forms)
