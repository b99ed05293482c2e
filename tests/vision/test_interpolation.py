"""Weights of position embeddings for other numbers of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlxpaged.vision.interpolation import bicubic, bilinear, bilinear_part, interpolated, resized_part

COUNTS = [1, 2, 3, 5, 8, 13, 16, 20, 40, 71]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1, 5, 16])
def test_bilinear_weights_are_those_of_pillow(count: int, size: int) -> None:
    """Pillow's filter is that of torch with antialias=True."""
    for place in range(size):
        line = np.zeros((1, size), np.float32)
        line[0, place] = 1
        wanted = np.array(Image.fromarray(line).resize((count, 1), Image.Resampling.BILINEAR))[0]
        assert np.array(bilinear(count, size))[:, place] == pytest.approx(wanted, abs=1e-6)


def cubic(distance: float) -> float:
    """torch's, with the parameter -0.75."""
    x = abs(distance)
    if x < 1:
        return 1.25 * x**3 - 2.25 * x**2 + 1
    return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1, 5, 16])
def test_bicubic_weights_are_those_of_the_definition(count: int, size: int) -> None:
    wanted = np.zeros((count, size))
    for i in range(count):
        at = (i + 0.5) * size / count - 0.5
        for place in range(math.floor(at) - 1, math.floor(at) + 3):
            wanted[i, min(max(place, 0), size - 1)] += cubic(at - place)
    assert np.array(bicubic(count, size)) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("weights", [bilinear, bicubic])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_as_many_places_as_before_are_the_same(weights: Callable[[int, int], mx.array], size: int) -> None:
    assert np.array_equal(np.array(weights(size, size)), np.eye(size))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1, 5, 16])
def test_a_part_has_the_weights_of_the_whole(count: int, size: int) -> None:
    whole = np.array(bilinear(count, size))
    for start in range(count):
        for stop in {start + 1, (start + count + 1) // 2, count}:
            places, weights = bilinear_part(count, size, slice(start, stop))
            wanted = whole[start:stop]
            assert not wanted[:, : places.start].any()
            assert not wanted[:, places.stop :].any()
            assert np.array(weights) == pytest.approx(wanted[:, places], abs=1e-6)


@pytest.mark.parametrize(("width", "height"), [(48, 32), (96, 70), (30, 18), (13, 80)])
def test_a_part_of_a_resized_image_is_that_of_pillow(width: int, height: int) -> None:
    """Which resizes rows before columns here, and rounds twice. A few values that lie between two numbers differ."""
    several = np.random.default_rng(2).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)
    rows, columns = slice(3, 11), slice(0, width - 5)
    found = np.array(resized_part(mx.array(several), height, width, rows, columns))
    assert found.dtype == np.uint8
    for image, part in zip(several, found, strict=True):
        lines = Image.fromarray(image).resize((width, 40), Image.Resampling.BILINEAR)
        wanted = np.array(lines.resize((width, height), Image.Resampling.BILINEAR))[rows, columns]
        differences = np.abs(part.astype(int) - wanted.astype(int))
        assert differences.max() <= 1
        assert differences.mean() < 0.05


def test_rows_and_columns_are_weighted_apart() -> None:
    rng = np.random.default_rng(1)
    grid, down, across = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4, 6), (5, 3), (2, 4)))
    found = interpolated(mx.array(grid).astype(mx.bfloat16), mx.array(down), mx.array(across))
    assert found.dtype == mx.float32
    rounded = np.array(mx.array(grid).astype(mx.bfloat16).astype(mx.float32))
    assert np.array(found) == pytest.approx(np.einsum("hwd,rh,cw->rcd", rounded, down, across), abs=1e-5)
