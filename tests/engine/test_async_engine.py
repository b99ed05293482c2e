"""The event loop's side of the engine: every output reaches its stream, even if the observer raises."""

from __future__ import annotations

import asyncio

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig


async def answers(engine: AsyncEngine, count: int) -> list[list[int]]:
    """The tokens of requests that are submitted together."""
    engine.start()
    await engine.wait_loaded()
    with engine.reserve(count) as now:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        streams = engine.submit([Request(str(i), [20 + i, 5], params, now) for i in range(count)])
    tokens = []
    for stream in streams:
        tokens.append([token async for output in stream for token in output.token_ids])
    await engine.drain(60)
    assert await engine.stop(60)
    return tokens


def test_an_observer_that_raises_costs_no_output(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def observe(request: Request, output: RequestOutput) -> None:
        seen.append(request.request_id)
        raise ValueError("injected")

    config = EngineConfig(kv_cache_bytes=4_000_000)
    expected = asyncio.run(answers(AsyncEngine(config), 3))
    assert [len(tokens) for tokens in expected] == [4, 4, 4]
    engine = AsyncEngine(config)
    engine.on_output = observe
    assert asyncio.run(answers(engine, 3)) == expected
    assert sorted(seen) == sorted(["0", "1", "2"] * 4)
    assert caplog.text.count("ValueError: injected") == 12


def test_a_model_whose_prefixes_cannot_be_stored_gives_back_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[EngineCore] = []

    def fail(core: EngineCore) -> None:
        raise OSError("injected")

    monkeypatch.setattr(EngineCore, "keep_prefixes", fail)
    monkeypatch.setattr(EngineCore, "close", lambda core: closed.append(core))
    assert asyncio.run(answers(AsyncEngine(EngineConfig(kv_cache_bytes=4_000_000)), 1))
    assert len(closed) == 1
