"""A Mac as its device information describes it: what the server takes by default, and what it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.models.device_memory import DESKTOP_LEAST, default_device_memory
from mlxpaged.models.layers import KV, LayerSpec, bytes_per_token
from mlxpaged.models.sources.short_names import full_name
from mlxpaged.parts.memory.fitting import LEAST_STEP, START_TOKENS, kv_blocks

GIB = 2**30
ROOT = Path(__file__).parents[2]

WEIGHTS = 2_263_000_000
LAYERS: list[LayerSpec] = [KV(8, 128, 128, mx.bfloat16)] * 36
CONTEXT = 40_960
"""Qwen3-4B in 4 bits."""

STEP = 2048 * (2560 + 2 * 9728 + 4096 + 2 * 1024) * 2 * 4
"""Bytes of a chunk of 2,048 tokens of this model, generously: four copies of all activations of a layer, in 16 bits."""


def be_a_mac(monkeypatch: pytest.MonkeyPatch, gibibytes: int, weights: int = WEIGHTS) -> dict[str, int]:
    """macOS gives a GPU two thirds of up to 36 GB, and three quarters of more."""
    total = gibibytes * GIB
    info = {
        "memory_size": total,
        "max_recommended_working_set_size": total * 2 // 3 if total <= 36 * GIB else total * 3 // 4,
    }
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: weights)
    return info


def greatest_pool(layers: list[LayerSpec] = LAYERS) -> int:
    """Bytes."""
    block = 32 * bytes_per_token(layers)
    return block * kv_blocks(block, None, CacheGroups().blocks_needed(CONTEXT, 2048), 32, reserved_bytes=LEAST_STEP)


def test_a_mac_of_8_gb_with_a_model_of_4_billion_parameters_keeps_room_for_a_step_and_a_desktop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info, pool = be_a_mac(monkeypatch, 8), greatest_pool()
    assert LEAST_STEP >= STEP
    assert WEIGHTS + pool + LEAST_STEP <= info["max_recommended_working_set_size"]
    assert WEIGHTS + pool + LEAST_STEP <= info["memory_size"] - DESKTOP_LEAST
    assert pool >= 8192 * bytes_per_token(LAYERS)
    assert START_TOKENS * bytes_per_token(LAYERS) <= pool / 6


def test_what_does_not_fit_a_mac_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    be_a_mac(monkeypatch, 8)
    block = 32 * bytes_per_token(LAYERS)
    with pytest.raises(
        MemoryError, match=r"--kv-cache-memory is 4\.0 GB, but only 2\.5 GB are free beside 1\.0 GB for"
    ):
        kv_blocks(block, 4_000_000_000, CONTEXT // 32, 32, reserved_bytes=LEAST_STEP)


def test_the_table_of_the_documentation_is_that_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (\d+) GB \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", page, re.MULTILINE)
    expected = []
    for gibibytes in (8, 16, 32, 64, 128):
        info = be_a_mac(monkeypatch, gibibytes)
        limit, server = info["max_recommended_working_set_size"], default_device_memory() + WEIGHTS
        expected.append((str(gibibytes), *(f"{size / 1e9:.1f}" for size in (limit, server, greatest_pool()))))
    assert rows == expected


def test_the_models_of_the_readme_have_the_kv_caches_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    row = r"^\| (\d+) GB \| `(\S+)` \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    shape = r"^\| (\S+) \| [\d.]+ B \| ([\d.]+) GB \| (\d+) x (\d+) x (\d+) x 4 = "
    shapes = re.findall(shape, (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    for ram, short_name, *sizes in rows:
        name = full_name(short_name).rpartition("/")[2]
        [(gigabytes, *numbers)] = [found for model, *found in shapes if name.startswith(f"{model}-")]
        num_layers, heads, size = map(int, numbers)
        weights, layers = int(float(gigabytes) * 1e9), [KV(heads, size, size, mx.bfloat16)] * num_layers
        be_a_mac(monkeypatch, int(ram), weights)
        expected = weights, 32_768 * bytes_per_token([*layers]), greatest_pool([*layers])
        rounded = 0.06  # the weights are rounded in the pages
        assert [float(shown) for shown in sizes] == pytest.approx([size / 1e9 for size in expected], abs=rounded), name
