"""Sizes and tokens of images in the prompts of Kimi-VL and Kimi K3."""

from __future__ import annotations

import pytest

from mlxpaged.vision.families.kimi.format import Kimi3Format, KimiFormat
from mlxpaged.vision.image import ImageFormat


def form(most: int = 4096, patch: int = 14, merge: int = 2) -> ImageFormat:
    return KimiFormat(placeholder=10, side=patch * merge, merge=merge, most=most)


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((1, 1), (28, 28)),
        ((28, 28), (28, 28)),
        ((29, 28), (56, 28)),
        ((640, 480), (644, 504)),
        ((896, 896), (896, 896)),
        ((909, 896), (924, 896)),
        ((910, 910), (896, 896)),
        ((1920, 1080), (1204, 672)),
        ((3000, 2000), (1120, 756)),
        ((4032, 3024), (1036, 784)),
        ((12, 2000), (28, 2016)),
        ((100, 7139), (112, 7140)),
    ],
)
def test_sizes_are_those_of_the_models_own_code(size: tuple[int, int], taken: tuple[int, int]) -> None:
    """The values are of `rescale` of KimiVLImageProcessor in mlx-vlm 0.7.10, with pad_input, as all models have it."""
    assert form().size(*size) == taken


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        ((1920, 1080), (1932, 1092)),
        ((3000, 2000), (2212, 1484)),
        ((4032, 3024), (2072, 1568)),
        ((16384, 100), (7168, 56)),
        ((300, 9000), (252, 7168)),
        ((12, 2000), (28, 2016)),
    ],
)
def test_sizes_of_kimi_k2_5(size: tuple[int, int], taken: tuple[int, int]) -> None:
    """The values are of `rescale` of KimiK25ImageProcessor in mlx-vlm."""
    assert KimiFormat(placeholder=10, side=28, merge=2, most=16_384, longest=512).size(*size) == taken


def test_a_side_has_at_most_511_patches() -> None:
    """The models' own code refuses longer ones."""
    assert form().size(16384, 82) == (7140, 56)
    assert form(most=16384).size(82, 16384) == (56, 7140)


@pytest.mark.parametrize(("width", "height"), [(28, 28), (84, 28), (56, 84)])
def test_each_square_is_a_placeholder(width: int, height: int) -> None:
    rows, columns = form().grid(width, height)
    assert (columns * 28, rows * 28) == (width, height)
    assert form().tokens(width, height) == [10] * (rows * columns)


def test_the_placeholder_is_what_the_template_writes() -> None:
    assert form().template_token == form().placeholder == 10


def test_settings_differ_if_pixels_do() -> None:
    forms = [form(), form(most=16384), form(patch=16), form(merge=1)]
    forms.append(KimiFormat(placeholder=10, side=28, merge=2, most=4096, longest=512))
    assert len({each.settings for each in forms}) == len(forms)
    assert form().settings == KimiFormat(placeholder=1, side=28, merge=2, most=4096).settings


def test_kimi_k3_is_told_the_size_of_an_image() -> None:
    """Its tokenizer splits a number after each third digit. 28 has no token here."""
    numbers = {str(digit): digit for digit in range(10)} | {"112": 100, "840": 101}
    shown = Kimi3Format(
        placeholder=50,
        side=28,
        merge=2,
        most=65_536,
        longest=512,
        opening=(51, 52, 53),
        times=54,
        content=55,
        end=56,
        numbers=numbers,
    )
    assert shown.size(1100, 830) == (1120, 840)
    tokens = shown.tokens(1120, 840)
    assert tokens[:7] == [51, 52, 53, 100, 0, 54, 101]
    assert tokens[7:] == [55, *[50] * (40 * 30), 56]
    assert shown.tokens(28, 28) == [51, 52, 53, 2, 8, 54, 2, 8, 55, 50, 56]
    assert shown.grid(1120, 840) == (30, 40)
