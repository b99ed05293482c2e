"""The keys that a query sees, and whole queries of latents."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.pool import Locality, Options
from mlxpaged.core.step import Row, Step


@pytest.mark.parametrize(
    ("locality", "first"),
    [
        (Locality(), [0, 0, 0, 0, 0]),
        (Locality(window=3), [0, 0, 1, 2, 6]),
        (Locality(window=1), [0, 2, 3, 4, 8]),
        (Locality(chunk=4), [0, 0, 0, 4, 8]),
    ],
)
def test_the_first_key_follows_window_or_chunk(locality: Locality, first: list[int]) -> None:
    assert locality.first_key(np.array([0, 2, 3, 4, 8])).tolist() == first


def test_tokens_of_an_image_see_one_another_if_the_layer_lets_them() -> None:
    """Tokens 4 to 9 of a sequence with an image at 5, 6 and 7."""
    step = Step([Row(1, 0, [9]), Row(2, 4, [9] * 6, spans=[(5, 8)])])
    assert Locality().last_keys(step, 1).tolist() == [4, 5, 6, 7, 8, 9]
    assert Locality(mutual=True).last_keys(step, 1).tolist() == [4, 7, 7, 7, 8, 9]
    assert not Locality().looks_ahead(step, [0, 1])
    assert Locality(mutual=True).looks_ahead(step, [0, 1])
    assert not Locality(mutual=True).looks_ahead(step, [0])


def test_the_rotary_part_of_a_query_is_not_scaled_twice() -> None:
    queries, q_pe = mx.ones((1, 2, 3)), mx.full((1, 2, 1), 0.5)
    options = Options(0.25, Locality(), None, None)
    assert options.whole(queries) is queries
    assert options._replace(q_pe=q_pe).whole(queries).tolist() == [[[1, 1, 1, 2], [1, 1, 1, 2]]]
