"""One real request moves every part: queue, block pool, prefix cache, block tables, engine steps, attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import metrics, post, random_tokens, run_on
from tests.support import RunningServer, running_server


@pytest.fixture(scope="module")
def fresh_server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=16_000_000, max_num_batched_tokens=64)) as server:
        yield server


def watched(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[list[list[int]]], int]]:
    """(batch, block tables of the rows, blocks in use) of every forward pass."""
    passes: list[tuple[Any, list[list[list[int]]], int]] = []
    runner, pool = server.core.runner, server.core.scheduler.pool
    forward = runner.forward

    def watching(batch: Any, *rest: Any) -> Any:
        passes.append((batch, [row.tables.tolist() for row in batch.rows], pool.usage().used))
        return forward(batch, *rest)

    monkeypatch.setattr(runner, "forward", watching)
    return passes


def test_one_request_moves_every_counter(fresh_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = watched(fresh_server, monkeypatch)
    before = metrics(fresh_server)
    prompt = random_tokens(100, 1)
    post(fresh_server, run_on(prompt, 30))
    fresh_server.wait_idle()
    after = metrics(fresh_server)
    moved = {name: after[name] - before.get(name, 0) for name in after}
    assert fresh_server.engine.info is not None

    # 100 tokens of prompt in steps of at most 64, then one step per token but for the first.
    assert [batch.num_tokens for batch, _, _ in passes] == [64, 36] + [1] * 29
    assert moved["mlxpaged_engine_steps_total"] == moved["mlxpaged_model_calls_total"] == len(passes) == 31
    assert moved["mlxpaged_attention_calls_total"] == 31 * fresh_server.engine.info.num_layers
    assert moved["mlxpaged_generated_tokens_total"] == 30
    assert moved["mlxpaged_prompt_tokens_total"] == 100
    # 129 tokens have keys and values in the end: five blocks, taken as they were needed.
    assert [used for _, _, used in passes] == [2, 4] + [4] * 28 + [5]
    tables = [table for _, ((table,),), _ in passes]
    assert all(len(table) == used for table, (_, _, used) in zip(tables, passes, strict=True))
    assert all(later[: len(table)] == table for table, later in itertools.pairwise(tables))
    assert moved["mlxpaged_kv_blocks|cached"] == 4
    assert after["mlxpaged_kv_blocks|used"] == 0

    del passes[:]
    again = post(fresh_server, run_on(prompt, 30))
    fresh_server.wait_idle()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert metrics(fresh_server)["mlxpaged_prefix_hit_tokens_total"] - after["mlxpaged_prefix_hit_tokens_total"] == 96
    assert [batch.num_tokens for batch, _, _ in passes] == [4] + [1] * 29
    assert passes[0][1][0][0][:3] == tables[0][:2] + tables[1][2:3]


def test_a_batch_decodes_one_token_per_sequence_and_step(
    fresh_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = watched(fresh_server, monkeypatch)
    post(fresh_server, run_on([random_tokens(10, seed) for seed in range(2, 6)], 12))
    fresh_server.wait_idle()
    decodes = [row for batch, _, _ in passes for row in batch.rows if row.start >= 10]
    assert {row.num_tokens for row in decodes} == {1}
    assert len(decodes) == 4 * 11
    assert max(len(batch.rows) for batch, _, _ in passes) == 4
