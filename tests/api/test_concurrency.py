"""Many streams at once: the same text as one by one, and a common prefix computed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    Background,
    FakeClock,
    StepGate,
    answer_text,
    ask,
    block_bytes,
    metrics,
    random_tokens,
    run_on,
    stream_at_once,
    stream_together,
)
from tests.support import RunningServer, poison_new_blocks, running_server, wait_until

QUESTIONS = ["Repeat: blue river stone", "What is 17 + 25?", "Reverse: a b c", "Who are you?"]

MIXED: list[dict[str, Any]] = [
    *[ask(question) for question in QUESTIONS * 2],
    *[run_on(random_tokens(1 + 13 * i, i), 4 + i) for i in range(16)],
    *[run_on(random_tokens(64, 7) + random_tokens(5, i), 12) for i in range(4)],
    *[run_on(random_tokens(33, i), 10, temperature=1.0, seed=i) for i in range(4)],
]
"""32 requests: answers that end by themselves, lengths around block borders, a shared prefix, seeded samples."""


@pytest.fixture(scope="module")
def one_by_one() -> list[str]:
    """The texts of MIXED, each request alone on a server without batching and without prefix cache."""
    config = EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1, prefix_caching=False)
    with running_server(config) as server:
        poison_new_blocks(server.core)
        texts = [answer_text(server, body) for body in MIXED]
        server.wait_idle()
    assert len(texts) == 32
    assert texts[:3] == ["blue river stone", "42", "c b a"]
    return texts


def stream_in_order(server: RunningServer, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of all requests, which arrive one after the other. The first step is that of the first request alone,
    and the others have arrived when it ends."""
    with StepGate(server) as gate:
        pending = []
        for number, body in enumerate(bodies, 1):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            pending.append(Background.post(server, path, body | {"stream": True}))
            wait_until(lambda n=number: server.engine.num_unfinished == n)  # type: ignore[misc]
            gate.wait_held()
        gate.open()
        return [request.text for request in pending]


def check_same_texts(
    config: EngineConfig,
    expected: list[str],
    stream: Callable[[RunningServer, list[dict[str, Any]]], list[str]] = stream_together,
) -> dict[str, float]:
    """The server's metrics after MIXED was streamed, all requests together, with the expected texts."""
    with running_server(config, clock=FakeClock()) as server:  # no request ages
        poison_new_blocks(server.core)
        assert stream(server, MIXED) == expected
        server.wait_idle()
        assert server.engine.info is not None
        after = metrics(server)
        blocks = [after[f"mlxpaged_kv_blocks|{state}"] for state in ("used", "cached", "free")]
        assert sum(blocks) == server.core.scheduler.pool.num_blocks
        assert blocks[0] == 0
        assert (after["mlxpaged_requests_running"], after["mlxpaged_requests_waiting"]) == (0, 0)
        return after


def test_32_concurrent_streams_equal_the_same_requests_one_by_one(one_by_one: list[str]) -> None:
    after = check_same_texts(EngineConfig(kv_cache_bytes=64_000_000), one_by_one, stream_at_once)
    assert after["mlxpaged_prefix_hit_tokens_total"] > 0
    # Had they run one after the other, there would be at least one step per token.
    assert after["mlxpaged_engine_steps_total"] < after["mlxpaged_generated_tokens_total"] / 4


def test_without_prefix_cache_the_texts_are_the_same(one_by_one: list[str]) -> None:
    after = check_same_texts(EngineConfig(kv_cache_bytes=64_000_000, prefix_caching=False), one_by_one)
    assert after["mlxpaged_prefix_hit_tokens_total"] == 0


def test_a_pool_too_small_for_all_swaps_and_gives_the_same_texts(
    demo_server: RunningServer, one_by_one: list[str], tmp_path: Path
) -> None:
    """Other sizes of pools and kinds of swap space: tests/engine/test_pressure.py."""
    block = block_bytes(demo_server)
    config = EngineConfig(
        kv_cache_bytes=9 * block,
        swap_space_bytes=100 * block,
        swap_dir=tmp_path,
        prefix_caching=False,
        max_num_batched_tokens=64,
    )
    # In one order of arrival, the pool runs out at the same places every time.
    after = check_same_texts(config, one_by_one, stream_in_order)
    assert after["mlxpaged_preemptions_total"] > 0
    out, back = (after[f"mlxpaged_kv_blocks_swapped_{way}_total"] for way in ("out", "in"))
    assert out == back > 0
    assert (after["mlxpaged_swap_blocks|used"], after["mlxpaged_swap_blocks|free"]) == (0, 100)


def test_sixteen_requests_that_arrive_together_compute_their_prefix_once() -> None:
    prefix = random_tokens(600, 4711)
    bodies = [run_on(prefix + random_tokens(8, 5000 + i), 4) for i in range(16)]
    with running_server(EngineConfig(kv_cache_bytes=64_000_000, max_num_batched_tokens=256)) as server:
        fed = count_tokens_fed(server)
        with StepGate(server) as gate:
            pending = [Background.post(server, "/v1/completions", body) for body in bodies]
            wait_until(lambda: server.engine.num_unfinished == 16)
            gate.open()
            texts = [request.text for request in pending]
        server.wait_idle()
        after = metrics(server)
        # 600 tokens are 18 whole blocks of 32, and 24. The first request computes all 608, the last 96 of them in
        # its third step. Five fit beside it, with the 32 tokens after the whole blocks; the rest begin after the 24.
        computed = after["mlxpaged_prompt_tokens_total"] - after["mlxpaged_prefix_hit_tokens_total"]
        assert computed == 608 + 5 * 32 + 10 * 8
        assert sum(fed) == computed + 16 * 3  # of four tokens of an answer, three go through the model again
        assert after["mlxpaged_requests_finished_total|length"] == 16
    with running_server(EngineConfig(kv_cache_bytes=64_000_000, prefix_caching=False)) as server:
        assert [answer_text(server, body) for body in bodies[::5]] == texts[::5]


def count_tokens_fed(server: RunningServer) -> list[int]:
    """Grows by one entry per forward pass: the tokens that went through the model."""
    forward, fed = server.core.runner.forward, []

    def counting(batch: Any, *rest: Any) -> Any:
        fed.append(batch.num_tokens)
        return forward(batch, *rest)

    server.core.runner.forward = counting  # type: ignore[method-assign]
    return fed


def test_every_forward_pass_runs_on_the_one_engine_thread(demo_server: RunningServer) -> None:
    forward, threads = demo_server.core.runner.forward, []

    def noting(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return forward(*args)

    demo_server.core.runner.forward = noting  # type: ignore[method-assign]
    try:
        stream_together(demo_server, [run_on(random_tokens(50, i), 100) for i in range(4)])
    finally:
        demo_server.core.runner.forward = forward  # type: ignore[method-assign]
    assert len(threads) >= 100
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_a_forward_pass_on_another_thread_is_refused(demo_server: RunningServer) -> None:
    with pytest.raises(RuntimeError, match="engine thread"):
        demo_server.core.runner.forward(None, None)  # type: ignore[arg-type]
