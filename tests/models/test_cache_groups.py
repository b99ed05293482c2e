"""The layers of real models in cache groups: every layer has memory of its own, and little is left unused."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxpaged.models.cache_groups import CacheLayout, cache_layout
from mlxpaged.models.layers import KV

CONTEXT = 131072


def kv(heads: int, size: int, window: int | None = None, value_size: int | None = None) -> KV:
    return KV(heads, size, value_size or size, mx.bfloat16, window)


def alternating(count: int, period: int, sliding: KV, full: KV) -> list[KV]:
    """Every `period`-th layer is full."""
    return [full if (i + 1) % period == 0 else sliding for i in range(count)]


MODELS: dict[str, tuple[list[KV], int, int]] = {
    # layers, groups, places of a block
    "gemma-3-1b": (alternating(26, 6, kv(1, 256, 512), kv(1, 256)), 7, 4),
    "gemma-3-4b": (alternating(34, 6, kv(4, 256, 1024), kv(4, 256)), 7, 5),
    "gemma-3-12b": (alternating(48, 6, kv(8, 256, 1024), kv(8, 256)), 6, 8),
    "gemma-3-27b": (alternating(62, 6, kv(16, 128, 1024), kv(16, 128)), 6, 11),
    "gemma-4-31b": (alternating(60, 6, kv(16, 256, 1024), kv(4, 512)), 11, 5),
    "gemma-4-26b-a4b": (alternating(30, 6, kv(8, 256, 1024), kv(2, 512)), 10, 3),
    "gemma-4-e2b": (alternating(15, 5, kv(1, 256, 512), kv(1, 512)), 3, 3),
    "gpt-oss-20b": (alternating(24, 2, kv(8, 64, 128), kv(8, 64)), 2, 12),
    "mimo-v2-flash": (alternating(48, 6, kv(8, 192, 128, 128), kv(4, 192, None, 128)), 11, 4),
    "mistral-7b-v0.1": ([kv(8, 128, 4096)] * 32, 1, 32),
    "llama-3.1-8b": ([kv(8, 128)] * 32, 1, 32),
}


def check(layers: list[KV], layout: CacheLayout) -> None:
    used = set()
    for spec, (place, view) in zip(layers, layout.layers, strict=True):
        largest = layout.places[place].kv_layout()
        assert largest.blocks_of(spec.kv_layout()) == view.ratio
        assert 0 <= view.part < view.ratio
        assert layout.windows[view.group] == spec.window
        used.add((view.group, place, view.part))
    assert len(used) == len(layers), "no two layers have one place"


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_one_window_share_groups_that_leave_few_places_unused(name: str) -> None:
    layers, num_groups, num_places = MODELS[name]
    layout = cache_layout(layers, CONTEXT)
    check(layers, layout)
    assert (len(layout.windows), len(layout.places)) == (num_groups, num_places)
    for window in set(layout.windows):
        needed = sum(spec.kv_layout().bytes_per_token for spec in layers if spec.window == window)
        taken = layout.windows.count(window) * layout.bytes_per_token
        assert needed <= taken <= 1.2 * needed


def test_a_window_that_no_context_passes_is_none() -> None:
    layers = alternating(12, 6, kv(4, 64, 4096), kv(4, 64))
    assert cache_layout(layers, 4096).windows == (None,)
    assert cache_layout(layers, 4097).windows.count(4096) == 5


def test_layers_whose_blocks_do_not_fit_each_other_keep_all_their_blocks() -> None:
    layers = [kv(3, 64, 512), kv(2, 64)]
    layout = cache_layout(layers, CONTEXT)
    assert layout.windows == (None,)
    assert layout.places == tuple(layers)
    mixed = [replace(kv(2, 64, 512), dtype=mx.float32), kv(2, 64)]
    assert cache_layout(mixed, CONTEXT).windows == (None,)


def test_a_model_without_kv_layers_has_one_group() -> None:
    assert cache_layout([], CONTEXT) == CacheLayout((None,), (), ())
