"""What a layout keeps for a token, and the bytes that it takes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxpaged.attention.layout import AttentionShape, KVLayout


def test_a_layout_counts_keys_and_values_of_their_own_sizes() -> None:
    layout = KVLayout(num_kv_heads=3, key_size=24, value_size=8, dtype=mx.float32, block_size=16)
    assert layout.bytes_per_token == 3 * (24 + 8) * 4
    assert [plane.nbytes for plane in layout.planes] == [16 * 3 * 24 * 4, 16 * 3 * 8 * 4]
    assert layout.bytes_per_block == 16 * layout.bytes_per_token


@pytest.mark.parametrize(
    ("heads", "key_size", "value_size"), [(2, 24, 16), (1, 16, 16)], ids=["two heads", "values as large as rows"]
)
def test_a_latent_layout_that_cannot_be_is_refused(heads: int, key_size: int, value_size: int) -> None:
    with pytest.raises(ValueError, match="a latent layout has one KV head, and rows that are longer than values"):
        KVLayout(heads, key_size, value_size, mx.float16, 8, latent=True)


def test_the_text_of_a_shape_tells_layouts_apart() -> None:
    layouts = [
        KVLayout(1, 24, 24, mx.float16, 8),
        KVLayout(1, 24, 16, mx.float16, 8),
        KVLayout(1, 24, 16, mx.float16, 8, latent=True),
    ]
    assert [str(AttentionShape(4, layout)).split(",")[0] for layout in layouts] == [
        "4 query heads on 1 KV heads of 24",
        "4 query heads on 1 KV heads of 24/16",
        "4 query heads on latents of 24/16",
    ]
