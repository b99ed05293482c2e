"""Sixteen streams in a pool for three of them: preempted and swapped many times, and the texts do not show it. Other
sizes and kinds of swap space: tests/engine/test_pressure.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import FakeClock, block_bytes, metrics, random_tokens, run_on
from tests.api.test_concurrency import stream_in_order
from tests.support import RunningServer, poison_new_blocks, running_server

BLOCKS = 12
BODIES: list[dict[str, Any]] = [
    run_on(random_tokens(40 + 7 * i, 100 + i), 50 + i, temperature=1.0 * (i % 2), seed=i) for i in range(16)
]


@pytest.fixture(scope="module")
def undisturbed(demo_server: RunningServer) -> list[str]:
    """In a pool with room for all of them."""
    before = metrics(demo_server)["mlxpaged_preemptions_total"]
    texts = stream_in_order(demo_server, BODIES)
    assert metrics(demo_server)["mlxpaged_preemptions_total"] == before
    return texts


@pytest.mark.parametrize("swap", ["none", "file"])
def test_sixteen_streams_in_a_tiny_pool_are_undisturbed(
    demo_server: RunningServer, undisturbed: list[str], swap: str, tmp_path: Path
) -> None:
    block = block_bytes(demo_server)
    config = EngineConfig(
        kv_cache_bytes=BLOCKS * block,
        swap_space_bytes=100 * block if swap == "file" else 0,
        swap_dir=tmp_path if swap == "file" else None,
        prefix_caching=False,
    )
    with running_server(config, clock=FakeClock()) as server:  # no request ages
        poison_new_blocks(server.core)
        before = metrics(server)
        # In one order of arrival, the pool runs out at the same places every time.
        assert stream_in_order(server, BODIES) == undisturbed
        server.wait_idle()
        after = metrics(server)
    for state in ("used", "free"):
        assert after[f"mlxpaged_kv_blocks|{state}"] == before[f"mlxpaged_kv_blocks|{state}"]
        assert after[f"mlxpaged_swap_blocks|{state}"] == before[f"mlxpaged_swap_blocks|{state}"]
    assert after["mlxpaged_preemptions_total"] >= 10
    out, back = (after[f"mlxpaged_kv_blocks_swapped_{way}_total"] for way in ("out", "in"))
    assert out == back
    assert out >= 30 if swap == "file" else out == 0
