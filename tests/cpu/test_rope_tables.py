"""Ropes with tables rotate as the model's own do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from mlxpaged.cpu.rope_tables import RopeByTables, tabulate_ropes
from tests.models.architectures import LLAMA3

POSITIONS = [0, 5, 100, 4000, 20000]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SU = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


class Model(nn.Module):
    def __init__(self, *ropes: nn.Module) -> None:
        super().__init__()
        self.ropes = list(ropes)


def rows(count: int = len(POSITIONS), tokens: int = 1) -> mx.array:
    mx.random.seed(3)
    return mx.random.normal((count, 3, tokens, 16))


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(16),
        nn.RoPE(16, base=5e5, scale=0.25),
        nn.RoPE(8),
        initialize_rope(16, 5e5, False, LLAMA3),
        initialize_rope(16, 1e4, False, YARN),
        initialize_rope(8, 1e4, False, YARN),
    ],
    ids=["plain", "scaled", "a half", "llama3", "yarn", "yarn of a half"],
)
def test_a_rope_with_tables_rotates_as_the_models_own(rope: Any) -> None:
    offsets = mx.array(POSITIONS)
    step, one = rope(rows(), offset=offsets), rope(rows(1, 7), offset=3)
    tabulate_ropes(Model(rope))
    assert isinstance(rope, RopeByTables)
    assert mx.allclose(rope(rows(), offset=offsets), step, rtol=1e-6, atol=1e-6)
    assert mx.allclose(rope(rows(), offset=offsets + 0), step, rtol=1e-6, atol=1e-6)
    assert not mx.allclose(rope(rows(), offset=offsets + 1), step, rtol=1e-6, atol=1e-6)
    assert mx.array_equal(rope(rows(1, 7), offset=3), one)  # one offset for all tokens


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_types_are_left_to_the_model(dtype: mx.Dtype) -> None:
    rope, own = nn.RoPE(16), nn.RoPE(16)
    tabulate_ropes(Model(rope))
    x, offsets = rows().astype(dtype), mx.array(POSITIONS)
    assert mx.array_equal(rope(x, offset=offsets), own(x, offset=offsets))


@pytest.mark.parametrize("rope", [nn.RoPE(16, traditional=True), initialize_rope(16, 1e4, False, SU, 32768)], ids=str)
def test_ropes_that_pair_other_elements_stay(rope: nn.Module) -> None:
    own = type(rope)
    tabulate_ropes(Model(rope))
    assert type(rope) is own


def test_ropes_with_equal_settings_share_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = [initialize_rope(16, 5e5, False, LLAMA3) for _ in range(3)]
    other = initialize_rope(16, 5e5, False, LLAMA3 | {"factor": 4.0})
    offsets = mx.array(POSITIONS)
    expected = other(rows(), offset=offsets)
    tabulate_ropes(Model(*alike, other))
    made = []
    rope = mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", lambda *args, **kwargs: made.append(1) or rope(*args, **kwargs))
    for each in (*alike, other, *alike):
        each(rows(), offset=offsets)
    assert len(made) == 2
    assert mx.allclose(other(rows(), offset=offsets), expected, rtol=1e-6, atol=1e-6)


def test_offsets_that_do_not_fit_the_rows_are_refused() -> None:
    rope = nn.RoPE(16)
    tabulate_ropes(Model(rope))
    with pytest.raises(ValueError, match="offset"):
        rope(rows(1), offset=mx.array(POSITIONS))
