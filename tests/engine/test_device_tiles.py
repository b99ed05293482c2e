"""The tiles of rows of models on a Mac's GPU, which these tests only name."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles
from mlxpaged.models.loader import load_model
from mlxpaged.parts.invariant import device_tiles as module
from mlxpaged.parts.invariant.device_tiles import device_tiles
from tests.models.architectures import make_architecture
from tests.support import make_tiny_model, quantize


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("quantized", "accelerators", "tiles"),
    [(False, False, RowTiles(64)), (True, False, RowTiles(32)), (True, True, RowTiles(32, 128))],
)
def test_quantized_weights_have_smaller_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: bool, accelerators: bool, tiles: RowTiles
) -> None:
    monkeypatch.setattr(module, "uses_neural_accelerators", lambda: accelerators)
    path = make_tiny_model(tmp_path, "llama")
    if quantized:
        quantize(path, 4)
    assert device_tiles(load_model(str(path))) == tiles


@pytest.mark.usefixtures("gpu")
def test_a_mixture_of_experts_needs_rows_for_each(tmp_path: Path) -> None:
    served = load_model(str(make_architecture(tmp_path, "qwen3_moe")))
    experts, chosen = 4, 2
    assert device_tiles(served) == RowTiles(64, 4 * experts // chosen)


def test_on_a_cpu_a_row_costs_the_same_in_any_number(tmp_path: Path) -> None:
    assert device_tiles(load_model(str(make_tiny_model(tmp_path, "llama")))) is ANY_ROWS
