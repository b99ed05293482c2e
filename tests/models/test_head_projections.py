"""Projections of latent attention with a matrix for each head."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.mla import MultiLinear

from mlxpaged.models.joins.head_projections import project_rows_together


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("transpose", [True, False])
def test_the_rows_of_a_step_are_one_product(monkeypatch: pytest.MonkeyPatch, bits: int | None, transpose: bool) -> None:
    plain: Any = MultiLinear(64, 64, 4)
    plain = plain if bits is None else plain.to_quantized(32, bits)
    rows, chunk = mx.random.normal((7, 4, 1, 64)), mx.random.normal((1, 4, 7, 64))
    expected = plain(rows, transpose), plain(chunk, transpose)
    base, shapes = type(plain), []
    call = base.__call__

    def watched(self: Any, x: mx.array, *args: Any) -> mx.array:
        shapes.append(x.shape)
        result: mx.array = call(self, x, *args)
        return result

    monkeypatch.setattr(base, "__call__", watched)
    for _ in range(2):  # the second time, there is nothing to do
        project_rows_together(plain)
    found = plain(rows, transpose), plain(chunk, transpose)
    assert shapes == [(1, 4, 7, 64)] * 2
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
