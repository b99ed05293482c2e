"""What a step costs does not depend on the size of the pools: nothing copies them, nothing walks over them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from tests.engine.helpers import lines_run
from tests.metal_on_cpu import Interpreter
from tests.support import make_tiny_model

SMALL, LARGE = 40, 4000  # blocks; of the large pool 65 MB a layer
PROMPTS = [list(range(100, 170)), [5], [9] * 31, [1, 2, 3]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("m"), "llama", num_key_value_heads=4, head_dim=64)))


def decoding(served: ServedModel, num_blocks: int, **options: Any) -> EngineCore:
    """An engine with pools that have grown to `num_blocks`, and prompts that are computed, so that every step decodes
    four tokens."""
    cache = num_blocks * 32 * bytes_per_token(served.layers)
    core = build_engine(EngineConfig(kv_cache_bytes=cache, **options), served, lambda: 0.0)  # nothing is done by time
    for pool in core.runner.pools:
        pool.resize(num_blocks)
    core.scheduler.blocks.size.grow(num_blocks)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        core.add(Request(str(i), prompt, params, 0.0))
    for _ in range(3):
        core.step()
    return core


def test_a_step_walks_over_no_pool(served: ServedModel) -> None:
    """A walk would run lines of Python for each block. A copy takes memory: see the next test."""
    counts = []
    for num_blocks in (SMALL, LARGE):
        core = decoding(served, num_blocks)
        counts.append(sorted(lines_run(core.step) for _ in range(20)))
    assert counts[1][-4] < counts[0][0] + LARGE // 4  # in a few steps, a garbage collection may run others' lines


def test_the_memory_of_a_step_does_not_grow_with_the_pools(served: ServedModel) -> None:
    peaks = []
    for num_blocks in (SMALL, LARGE):
        core = decoding(served, num_blocks)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        core.step()
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] + 1_000_000


def test_overlapped_steps_of_the_kernels_move_the_same_bytes_in_any_pool(
    served: ServedModel, metal_on_cpu: Interpreter
) -> None:
    """The interpreter's own time says nothing about a GPU's; the bytes that a kernel loads and stores do. The peak of
    memory shows that MLX copies nothing between the kernels either."""
    moved, peaks = [], []
    for num_blocks in (SMALL, LARGE // 10):
        core = decoding(served, num_blocks, attention_backend="metal")
        assert core.runner.overlaps
        metal_on_cpu.launches.clear()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        core.step()
        peaks.append(mx.get_peak_memory() - before)
        moved.append([(launch.kernel, launch.load_bytes, launch.store_bytes) for launch in metal_on_cpu.launches])
    assert moved[0] == moved[1] != []
    assert peaks[1] < peaks[0] + 1_000_000
