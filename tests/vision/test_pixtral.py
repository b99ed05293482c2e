"""The tower of Pixtral and Mistral 3 computes what its definition says, alone and in batches."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.vision import blocks
from mlxpaged.vision.families.pixtral.tower import PixtralSizes
from mlxpaged.vision.patches import normalized
from tests.vision.tiny import MERGED, PLAIN, features, images, reference_features, tiny_tower

BOTH = pytest.mark.parametrize("sizes", [MERGED, PLAIN], ids=["mistral3", "pixtral"])


@BOTH
@pytest.mark.parametrize(("width", "height"), [(8, 8), (24, 16), (16, 40)])
def test_features_are_those_of_the_definition(sizes: PixtralSizes, width: int, height: int) -> None:
    tower, [image] = tiny_tower(sizes), images(1, width, height)
    wanted = reference_features(tower, image)
    assert features(tower, image[None])[0] == pytest.approx(wanted, abs=2e-5 * float(np.abs(wanted).max()))


@BOTH
def test_a_batch_has_the_features_of_each_image_alone(sizes: PixtralSizes) -> None:
    tower, several = tiny_tower(sizes), images(3, 24, 16)
    together = features(tower, several)
    for image, found in zip(several, together, strict=True):
        assert found == pytest.approx(features(tower, image[None])[0], abs=1e-5 * float(np.abs(found).max()))


def test_images_of_a_batch_do_not_see_one_another() -> None:
    tower, several = tiny_tower(MERGED), images(3, 24, 16)
    before = features(tower, several)
    several[1] = 0
    after = features(tower, several)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])


def test_an_encoding_may_be_evaluated_after_any_of_its_parts() -> None:
    tower, pixels = tiny_tower(MERGED), images(2, 24, 16)
    whole = features(tower, pixels)
    for stride in (1, 2):
        parts = list(tower.encode(mx.array(pixels)))
        assert len(parts) == 2 * MERGED.blocks + 1
        for i, part in enumerate(parts, start=1):
            if i % stride == 0:
                mx.eval(part)
        assert np.array_equal(np.array(parts[-1]), whole)


def test_nothing_is_evaluated_before_the_caller_asks() -> None:
    tower = tiny_tower(MERGED)
    pixels = mx.array(images(2, 64, 64))
    mx.eval(pixels)
    before = mx.get_active_memory()
    parts = list(tower.encode(pixels))
    assert mx.get_active_memory() - before < pixels.nbytes
    mx.eval(parts)
    assert mx.get_active_memory() - before > pixels.nbytes


def test_all_values_of_a_pixel_are_normalized_as_by_the_image_processor() -> None:
    """transformers multiplies by 1/255 in float64, rounds to float32, then subtracts and divides in float32."""
    values = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 16, 16, 3)
    scaled = (values.astype(np.float64) * (1 / 255)).astype(np.float32)
    wanted = (scaled - np.array(MERGED.mean, np.float32)) / np.array(MERGED.std, np.float32)
    assert np.array_equal(np.array(normalized(mx.array(values), MERGED.mean, MERGED.std)), wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_weights_give_near_features_of_their_type(dtype: mx.Dtype) -> None:
    tower, pixels = tiny_tower(MERGED, dtype), images(1, 24, 16)
    *_, last = tower.encode(mx.array(pixels))
    assert last.dtype == dtype
    wanted = reference_features(tower, pixels[0])
    assert features(tower, pixels)[0] == pytest.approx(wanted, abs=0.1 * float(np.abs(wanted).max()))


def test_the_bytes_of_a_tower_are_those_of_its_weights() -> None:
    tower = tiny_tower(PLAIN)
    patches, block = 4 * 4 * 3 * 24 + 24, 4 * 24 * 24 + 3 * 24 * 20 + 2 * 24
    assert tower.nbytes == 4 * (patches + 2 * block + 24 * 16 + 16 + 16 * 16 + 16)


def test_a_block_is_computed_for_some_patches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, several = tiny_tower(MERGED), images(2, 40, 24)
    whole, num_parts = features(tower, several), len(list(tower.encode(mx.array(several))))
    monkeypatch.setattr(blocks.pace, "patches", {"heads": 24, "rest": 24})
    assert features(tower, several) == pytest.approx(whole, abs=1e-5 * float(np.abs(whole).max()))
    assert len(list(tower.encode(mx.array(several)))) > num_parts
