"""Sizes and tokens of images in the prompts of LFM2-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxpaged.vision.families.lfm2.format import Lfm2Format, Tiles
from mlxpaged.vision.image import ImageFormat

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


TILES = Tiles(
    side=512,
    least=2,
    most=10,
    tolerance=2.0,
    pixels=2_400_000,
    thumbnail=True,
    names={(row, column): 100 + 10 * row + column for row in range(10) for column in range(10)},
    thumbnail_name=13,
)
SPLIT = Lfm2Format(placeholder=IMAGE, around=(START, END), side=32, least=64, most=256, tiles=TILES)


@pytest.mark.parametrize(
    ("size", "grid", "thumbnail"),
    [
        ((1920, 1080), (2, 4), (672, 384)),
        ((1080, 1920), (4, 2), (384, 672)),
        ((1024, 512), None, (704, 352)),
        ((1040, 520), None, (704, 352)),
        ((1100, 550), (1, 2), (704, 352)),
        ((2100, 1050), (2, 4), (704, 352)),
        ((1200, 800), (2, 3), (608, 416)),
        ((724, 724), (2, 2), (512, 512)),
        ((1500, 1500), (3, 3), (512, 512)),
        ((1750, 1000), (2, 4), (672, 384)),
        ((900, 1440), (3, 2), (384, 640)),
        ((3000, 300), (1, 10), (1600, 160)),
        ((82, 16384), (10, 1), (32, 7232)),
        ((16, 16384), None, (32, 16384)),
    ],
)
def test_large_images_are_split_as_those_of_transformers(
    size: tuple[int, int], grid: tuple[int, int] | None, thumbnail: tuple[int, int]
) -> None:
    """The values are of `_is_image_too_large`, `_get_grid_layout` and `smart_resize` of its Lfm2VlImageProcessor."""
    taken = SPLIT.size(*size)
    assert SPLIT.split(*taken) == grid
    assert SPLIT.whole_size(*size) == thumbnail
    assert taken == (thumbnail if grid is None else size)
    count = thumbnail[0] * thumbnail[1] // 1024
    tiles = 0 if grid is None else grid[0] * grid[1]
    assert SPLIT.tokens(*taken).count(IMAGE) == 256 * tiles + count
    rows, columns = SPLIT.grid(*taken)
    assert rows * columns == 256 * tiles + count


def test_tiles_and_the_thumbnail_have_tokens_before_them() -> None:
    tile = [IMAGE] * 256
    wanted = [START, 100, *tile, 101, *tile, 102, *tile, 110, *tile, 111, *tile, 112, *tile, 13, *[IMAGE] * 247, END]
    assert SPLIT.tokens(1200, 800) == wanted
    small = replace(SPLIT, tiles=replace(TILES, thumbnail=False, thumbnail_name=None, names={}), around=None)
    assert small.tokens(1200, 800) == [IMAGE] * 256 * 6


def test_an_image_is_reduced_to_the_limit_before_it_is_split() -> None:
    for width, height in ((4000, 3000), (2000, 16384), (6324, 6324)):
        kept = SPLIT.size(width, height)
        assert 2_390_000 < kept[0] * kept[1] <= 2_400_000
        assert kept[0] / kept[1] == pytest.approx(width / height, rel=2e-3)
        assert SPLIT.size(*kept) == kept
        assert SPLIT.split(*kept) is not None


def test_the_placeholder_is_what_the_template_writes() -> None:
    assert form().template_token == form().placeholder == IMAGE


def test_settings_differ_if_pixels_do() -> None:
    tiles: list[dict[str, Any]] = [{}, {"side": 256}, {"most": 9}, {"tolerance": 1.0}, {"thumbnail": False}]
    forms = [form(), form(side=28), form(least=1), form(most=128)]
    forms += [replace(SPLIT, tiles=replace(TILES, **change)) for change in tiles]
    assert len({each.settings for each in forms}) == len(forms)
    assert form().settings == Lfm2Format(placeholder=1, around=None, side=32, least=64, most=256).settings
