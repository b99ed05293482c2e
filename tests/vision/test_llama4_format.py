"""Llama 4 sees an image in tiles, and as a whole after them."""

from __future__ import annotations

import random

import pytest

from mlxpaged.vision.families.llama4.format import Llama4Format

FORM = Llama4Format(
    template_token=1, start=2, placeholder=3, end=4, across=5, down=6, side=336, rows=2, most=16, resampling="BILINEAR"
)
TILE = [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("image", "tiles", "size"),
    [
        ((96, 64), (1, 1), (336, 224)),
        ((336, 336), (1, 1), (336, 336)),
        ((500, 400), (2, 2), (500, 400)),
        ((200, 300), (1, 1), (224, 336)),
        ((337, 100), (1, 2), (337, 100)),
        ((1920, 1080), (3, 5), (1680, 945)),
        ((4000, 3000), (3, 4), (1344, 1008)),
        ((16_384, 16_384), (4, 4), (1344, 1344)),
        ((16_384, 100), (1, 16), (5376, 32)),
        ((1, 16_384), (16, 1), (1, 5376)),
    ],
)
def test_tiles_enlarge_an_image_least_or_reduce_it_least(
    image: tuple[int, int], tiles: tuple[int, int], size: tuple[int, int]
) -> None:
    assert FORM.tiles(*image) == tiles
    assert FORM.size(*image) == size


def test_an_image_of_its_size_keeps_it_and_fits_its_tiles() -> None:
    source = random.Random(1)
    for _ in range(500):
        width, height = FORM.size(source.randrange(1, 5000), source.randrange(1, 5000))
        assert FORM.size(width, height) == (width, height)
        rows, columns = FORM.tiles(width, height)
        assert width <= columns * FORM.side
        assert height <= rows * FORM.side
        tokens = FORM.tokens(width, height)
        down, across = FORM.grid(width, height)
        assert tokens.count(FORM.placeholder) == down * across


def test_a_small_image_is_one_tile() -> None:
    assert FORM.tokens(336, 336) == [2, 1, *TILE, 4]


def test_tiles_come_row_by_row_before_the_whole_image() -> None:
    row = [*TILE, 5, *TILE, 6]
    assert FORM.tokens(500, 400) == [2, *row, *row, 1, *TILE, 4]
