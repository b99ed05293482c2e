"""GET /v1/status and POST /v1/cache/clear: what the engine says about its sequences and blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.cli.banner import banner
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    FakeClock,
    StepGate,
    answer_text,
    check_failure,
    metrics,
    post,
    random_tokens,
    raw,
    run_on,
    start,
    within_one_step,
)
from tests.support import RunningServer, make_tiny_model, running_server

COMPLETIONS, STATUS, CLEAR = "/v1/completions", "/v1/status", "/v1/cache/clear"

MAMBA = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}

clock = FakeClock()


@pytest.fixture(scope="module")
def server(rows_are_timed: None) -> Iterator[RunningServer]:
    config = EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=2, max_queue=1100)
    with running_server(config, clock=clock) as server:
        yield server


def ask_idle(server: RunningServer, method: str, path: str) -> dict[str, Any]:
    with raw(server) as client:
        response = client.request(method, path)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_an_idle_engine_says_so(server: RunningServer) -> None:
    post(server, run_on("x", 3))
    server.wait_idle()
    clock.advance(100)
    status = ask_idle(server, "GET", STATUS)
    assert status["uptime_seconds"] >= 100
    assert server.engine.stats is not None
    stats = server.engine.stats
    usage, info = stats.scheduler.blocks, server.engine.info
    assert status["resident_bytes"] > 0
    assert {name: status[name] for name in status if name not in ("uptime_seconds", "resident_bytes")} == {
        "state": "ok",
        "reason": None,
        "model": "demo",
        "steps": server.engine.stats.steps_total,
        "step_seconds": status["step_seconds"],
        "running": {"total": 0, "sequences": []},
        "waiting": {"total": 0, "sequences": []},
        "blocks": {
            "used": 0,
            "cached": usage.cached,
            "free": usage.free,
            "total": usage.cached + usage.free,
            "max_total": info.num_blocks,
        },
        "kv_cache": {
            "bytes": stats.kv_cache_bytes,
            "max_bytes": info.kv_cache_bytes,
            "dtype": "auto",
            "dtype_because": None,
        },
        "swap": {"used": 0, "total": 0, "written_today_bytes": 0, "written_bytes": 0},
        "tokens": {
            "prompt": stats.scheduler.prompt_tokens_total,
            "cached": stats.scheduler.prefix_hit_tokens_total,
            "prefilled": stats.prefilled_tokens_total,
            "output": stats.generated_tokens_total,
        },
        "prefix_cache_disk": status["prefix_cache_disk"],
        "speculative": {
            "drafters": ["grammar", "ngram"],
            "no_mtp_because": "it has no draft head",
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "tokens_per_pass": 1.0,
            "share_of_steps": 0.0,
            "speedup": 1.0,
            "by_drafter": {name: {"drafted": 0, "accepted": 0} for name in ("grammar", "ngram", "mtp", "model")},
        },
        "ranks": None,
        "attention": {"backend": resolve_backend("auto"), "metal_kernels_off": None, "invariant_rows": None},
        "states": {"reserved_bytes": 0, "bytes_per_sequence": 0, "checkpoints": 0, "max_checkpoints": 0},
        "embeddings": {"model": None, "inputs_waiting": 0},
        "models": status["models"],
    }
    assert {"1", "2", "4"} <= status["step_seconds"].keys(), "they were timed at the start"
    assert all(seconds >= 0 for seconds in status["step_seconds"].values())
    [model] = status["models"]
    assert (model["id"], model["state"], model["kind"]) == ("demo", "loaded", "text")
    assert model["memory_bytes"] == info.weight_bytes + stats.kv_cache_bytes
    assert {name: model[name] for name in ("steps", "blocks", "running")} == {
        name: status[name] for name in ("steps", "blocks", "running")
    }


def test_tokens_are_counted_when_they_are_computed(server: RunningServer) -> None:
    def counted() -> dict[str, int]:
        server.wait_idle()
        return dict(ask_idle(server, "GET", STATUS)["tokens"])

    before = counted()
    for _ in range(2):
        post(server, run_on(random_tokens(100, seed=77), 5))
    after = {name: count - before[name] for name, count in counted().items()}
    assert (after["prompt"], after["output"]) == (200, 10)
    assert after["cached"] > 0
    assert after["prefilled"] == after["prompt"] - after["cached"] - 2, "the last token of a prompt has a sample"


def test_checkpoints_of_recurrent_states_are_counted(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "mamba", **MAMBA)
    state = 2 * (96 * 8 * 4 + 96 * 3 * 4)  # layers; of the state and of the convolution, in float32
    config = EngineConfig(str(path), "demo", kv_cache_bytes=1_000_000, max_num_seqs=2, state_cache_bytes=5 * state)
    expected = {"reserved_bytes": 7 * state, "bytes_per_sequence": state, "checkpoints": 0, "max_checkpoints": 5}
    with running_server(config) as server:
        assert ask_idle(server, "GET", STATUS)["states"] == expected
        body = run_on(random_tokens(100, 1), 3)
        post(server, body)
        server.wait_idle()
        assert ask_idle(server, "GET", STATUS)["states"] == expected | {"checkpoints": 1}
        shown = metrics(server)
        names = ("state_checkpoints", "max_state_checkpoints", "state_reserved_bytes")
        assert [shown[f"mlxpaged_{name}"] for name in names] == [1, 5, 7 * state]
        assert post(server, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        ask_idle(server, "POST", CLEAR)
        assert ask_idle(server, "GET", STATUS)["states"] == expected


def test_running_and_waiting_sequences_are_described(server: RunningServer) -> None:
    with StepGate(server) as gate:
        pending = [start(server, run_on(random_tokens(40, 1), 30), "a")]
        clock.advance(1)
        pending.append(start(server, run_on(random_tokens(70, 2), 30), "b"))
        clock.advance(2)
        pending.append(start(server, run_on(random_tokens(20, 3), 30, service_tier="flex"), "low"))
        clock.advance(3)
        pending.append(start(server, run_on(random_tokens(20, 4), 30), "normal"))
        clock.advance(1)
        gate.allow(4)
        status = within_one_step(server, gate, "GET", STATUS).json()
        gate.open()
        assert [request.result().status_code for request in pending] == [200] * 4
    assert status["running"]["total"] == 2
    first, second = status["running"]["sequences"]
    assert first == {
        "request_id": "a",
        "status": "running",
        "phase": "decode",
        "priority": "normal",
        "effective_priority": pytest.approx(1 - 0.1 * 7),
        "age_seconds": pytest.approx(7),
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 5,
        "computed_tokens": 44,
        "blocks": 2,
        "shared_blocks": 0,
        "max_ref_count": 1,
        "preemptions": 0,
    }
    assert (second["request_id"], second["priority"], second["blocks"]) == ("b", "normal", 3)
    assert second["effective_priority"] == pytest.approx(1 - 0.1 * 6)
    assert status["blocks"]["used"] == 5
    assert status["waiting"]["total"] == 2
    waiting = status["waiting"]["sequences"]
    assert [(w["request_id"], w["status"], w["phase"], w["blocks"]) for w in waiting] == [
        ("normal", "waiting", None, 0),
        ("low", "waiting", None, 0),
    ]
    assert [w["effective_priority"] for w in waiting] == [pytest.approx(0.9), pytest.approx(1.6)]


def test_a_prompt_in_chunks_is_in_prefill_until_its_last_chunk_is_computed() -> None:
    def shown(server: RunningServer, gate: StepGate) -> list[tuple[int, str]]:
        sequences = within_one_step(server, gate, "GET", STATUS).json()["running"]["sequences"]
        return [(sequence["computed_tokens"], sequence["phase"]) for sequence in sequences]

    config = EngineConfig(kv_cache_bytes=8_000_000, max_num_seqs=2, max_num_batched_tokens=64)
    with running_server(config) as server, StepGate(server) as gate:
        pending = [start(server, run_on(random_tokens(200, 9), 30), "long")]
        assert [shown(server, gate) for _ in range(5)] == [
            [(64, "prefill")],
            [(128, "prefill")],
            [(192, "prefill")],
            [(200, "decode")],
            [(201, "decode")],
        ]
        pending.append(start(server, run_on(random_tokens(100, 10), 30), "next"))
        gate.allow(1)
        both = [shown(server, gate) for _ in range(6)]
        assert {phase for (_, phase), _ in both} == {"decode"}
        assert both[0][1][1] == "prefill"
        assert both[-1][1][1] == "decode"
        assert [phase for _, (_, phase) in both] == [
            "prefill" if computed < 100 else "decode" for _, (computed, _) in both
        ]
        gate.open()
        assert [request.result().status_code for request in pending] == [200, 200]


def test_ten_shared_blocks_show_two_holders_and_are_logged(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = random_tokens(320, 5)
    with caplog.at_level("DEBUG", logger="mlxpaged.core.scheduling"), StepGate(server) as gate:
        pending = [start(server, run_on([*prefix, 20 + i], 30), f"sharer-{i}") for i in range(2)]
        gate.allow(2)
        status = within_one_step(server, gate, "GET", STATUS).json()
        gate.open()
        assert [request.result().status_code for request in pending] == [200, 200]
    first, second = status["running"]["sequences"]
    assert (first["shared_blocks"], first["max_ref_count"]) == (10, 2)
    assert (second["shared_blocks"], second["max_ref_count"]) == (10, 2)
    assert "prefix_hit=true, 10 blocks (320 tokens), reference counts up to 2" in caplog.text
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 320)
    assert status["blocks"]["used"] == 12  # ten that both hold, and one each


def test_no_more_than_a_thousand_that_wait_are_listed(server: RunningServer) -> None:
    with StepGate(server) as gate:
        pending = start(server, run_on(["x"] * 65, 5, n=16), "crowd")
        gate.allow(1)
        status = within_one_step(server, gate, "GET", STATUS).json()
        assert (status["running"]["total"], status["waiting"]["total"]) == (2, 65 * 16 - 2)
        running, waiting = ([s["request_id"] for s in status[state]["sequences"]] for state in ("running", "waiting"))
        assert len(waiting) == 1000
        assert waiting == [name for name in (f"crowd-{i}" for i in range(1002)) if name not in running]
        assert within_one_step(server, gate, "DELETE", "/v1/requests").json()["data"][0]["id"] == "crowd"
        check_failure(pending, 499, "request_cancelled", "request_cancelled")
    server.wait_idle()


def test_the_default_priority_is_the_servers_to_choose() -> None:
    config = EngineConfig(kv_cache_bytes=16_000_000, default_priority=Priority.HIGH)
    with running_server(config) as server, StepGate(server) as gate:
        tiers = [("a", None), ("b", "auto"), ("c", "flex"), ("d", "priority")]
        pending = [start(server, run_on("x", 9, service_tier=tier), name) for name, tier in tiers]
        assert within_one_step(server, gate, "GET", STATUS).status_code == 200
        running = within_one_step(server, gate, "GET", STATUS).json()["running"]["sequences"]
        assert {s["request_id"]: s["priority"] for s in running} == {"a": "high", "b": "high", "c": "low", "d": "high"}
        gate.open()
        used = [request.result().json()["service_tier"] for request in pending]
        assert used == ["default", "default", "flex", "priority"]


def test_without_a_model_the_status_has_no_engine() -> None:
    with running_server(None) as server:
        status = ask_idle(server, "GET", STATUS)
        assert {name: status[name] for name in ("state", "reason", "model")} == {
            "state": "ok",
            "reason": None,
            "model": None,
        }
        with raw(server) as client:
            assert client.post(CLEAR).json()["error"]["code"] == "no_model"


def test_clearing_the_cache_forgets_every_prefix(server: RunningServer) -> None:
    ask_idle(server, "POST", CLEAR)
    body = run_on(random_tokens(100, 6), 4)
    text = answer_text(server, body)
    assert post(server, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    server.wait_idle()
    assert ask_idle(server, "POST", CLEAR) == {"dropped_blocks": 4}
    assert ask_idle(server, "GET", STATUS)["blocks"]["cached"] == 0
    assert ask_idle(server, "POST", CLEAR) == {"dropped_blocks": 0}
    again = post(server, body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["text"] == text


def test_clearing_the_cache_leaves_running_requests_their_blocks(server: RunningServer) -> None:
    ask_idle(server, "POST", CLEAR)
    body = run_on(random_tokens(100, 7), 40)
    expected = answer_text(server, body)
    server.wait_idle()
    ask_idle(server, "POST", CLEAR)
    with StepGate(server) as gate:
        pending = start(server, body, "it")
        gate.allow(3)
        assert within_one_step(server, gate, "POST", CLEAR).json() == {"dropped_blocks": 3}
        assert server.core.scheduler.pool.usage().used == 4
        gate.open()
        assert pending.text == expected
    server.wait_idle()


def test_without_a_prefix_cache_there_is_nothing_to_clear() -> None:
    with running_server(EngineConfig(kv_cache_bytes=8_000_000, prefix_caching=False)) as server:
        post(server, run_on(random_tokens(100, 8), 4))
        assert ask_idle(server, "POST", CLEAR) == {"dropped_blocks": 0}


def test_an_engine_that_does_not_reply_is_reported_busy(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxpaged.engine import async_engine

    with StepGate(server) as gate, raw(server) as client:
        pending = start(server, run_on("x", 5), "it")
        gate.wait_held()
        with monkeypatch.context() as patch:
            patch.setattr(async_engine, "REPLY_SECONDS", 0.05)
            for method, path in (("GET", STATUS), ("POST", CLEAR), ("DELETE", "/v1/requests/it")):
                response = client.request(method, path)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_busy"
                assert int(response.headers["retry-after"]) >= 1
        gate.allow(1)  # the cancellation was heard all the same
        check_failure(pending, 499, "request_cancelled", "request_cancelled")
    server.wait_idle()
    assert ask_idle(server, "GET", STATUS)["state"] == "ok"


def test_a_question_is_cancelled_although_its_reply_comes_at_that_moment(server: RunningServer) -> None:
    """Otherwise the caller continues after its cancellation: `mlxpaged bench` went on measuring after Ctrl-C."""

    async def cancelled() -> bool:
        asked = asyncio.ensure_future(server.engine.clear_cache())
        await asyncio.sleep(0)
        time.sleep(0.2)  # the reply is there, and this loop has not seen it yet
        asked.cancel()
        await asyncio.wait([asked])
        return asked.cancelled()

    assert server.run(cancelled()).result(DEADLINE)
    assert ask_idle(server, "POST", CLEAR) == {"dropped_blocks": 0}


@pytest.mark.parametrize(("allowed", "dtype"), [(0.05, "int4"), (0.01, "int8"), (0.0, "auto")])
def test_the_type_of_the_kv_cache_and_the_reason_are_shown(
    allowed: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model with 4-bit values. allowed: nats by which its predictions may change."""
    monkeypatch.setattr("mlxpaged.models.checks.quantized_kv.MOST_DIVERGENCE", allowed)
    with running_server(EngineConfig(kv_cache_dtype="int4", kv_cache_bytes=10_000_000)) as server:
        found = ask_idle(server, "GET", STATUS)["kv_cache"]
        text = banner(server.registry, server.url, needs_key=False)
        post(server, {"model": "demo", "prompt": "1 2", "max_tokens": 3})
    assert found["dtype"] == dtype
    assert (f", {dtype}:" in text) == (dtype != "auto")
    if dtype == "int4":
        assert found["dtype_because"] is None
        assert "the KV cache is not" not in text
    else:
        assert "the predictions of the probe change by" in found["dtype_because"]
        assert f"  larger    the KV cache is not int4: {found['dtype_because']}" in text
