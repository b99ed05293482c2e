"""Random tools and schemas in a batch that is too large for its blocks: each answer is what its request requires."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, StepGate, block_bytes
from tests.api.schemas import random_object, random_schema
from tests.scripted import demo_with_tools, make_scripted_model
from tests.support import RunningServer, running_server, wait_until

NAMES = ("get", "get_more", "f-1", "a.b", "Z" * 40)


def thinking_model(directory: Path) -> Path:
    """Random weights; a token for every byte and every tag."""
    return make_scripted_model(directory, "json_tools")


@contextmanager
def crowded_server(model: Path, blocks: int) -> Iterator[RunningServer]:
    with running_server(EngineConfig(model=str(model), kv_cache_bytes=1_000_000)) as server:
        size = block_bytes(server)
    limits = {"kv_cache_bytes": blocks * size, "max_num_seqs": 16}
    config = EngineConfig(model=str(model), served_model_name="fuzz", **limits)
    with running_server(config) as server:
        yield server


ENDS = {demo_with_tools: {"2": 8}, thinking_model: {"1": 5, "92": 5, "256": 5}}
"""Biases: they end the answer where that is allowed, or what is in it (a string, an object)."""
BLOCKS = {demo_with_tools: 24, thinking_model: 160}
"""Of the pool: few more than one request may need."""


def random_request(seed: int, make: Any) -> dict[str, Any]:
    rng = random.Random(seed)
    tools: list[Any] = []
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        parameters = random_object(rng, rng.randint(1, 2)) if rng.random() < 0.8 else None
        function = {"name": name, "parameters": parameters, "strict": rng.choice([True, True, False, None])}
        tools.append({"type": "function", "function": function})
    name = rng.choice(tools)["function"]["name"]
    named = {"type": "function", "function": {"name": name}}
    body: dict[str, Any] = {
        "model": "fuzz",
        "messages": [{"role": "user", "content": f"Repeat: {seed}"}],
        "tools": tools,
        "tool_choice": rng.choice(["required", "required", named, "auto"]),
        "parallel_tool_calls": rng.choice([True, False, None]),
        "temperature": 1,
        "max_tokens": 600,
        "seed": seed,
        "logit_bias": ENDS[make],
        "stream": seed % 2 == 0,
        "extra_body": {"min_tokens": rng.choice([0, 0, 10, 100])},
    }
    if rng.random() < 0.3:
        schema = random_schema(seed)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}
    if make is thinking_model:
        body["extra_body"]["thinking_budget"] = rng.choice([1, 5, 40])
    return body


async def answer(client: AsyncOpenAI, body: dict[str, Any]) -> dict[str, Any]:
    completion: Any = await client.chat.completions.create(**body)
    if not body["stream"]:
        (choice,) = completion.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return {"text": choice.message.content or "", "calls": calls, "reason": choice.finish_reason}
    text, made, reason = "", [], None
    async for chunk in completion:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                made.append([call.function.name, ""])
            made[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return {"text": text, "calls": made, "reason": reason}


def answers(server: RunningServer, bodies: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    async def together() -> list[Any]:
        # A client's grammars wait for turns: more of them than may wait are refused, and asked for again.
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 20}
        async with AsyncOpenAI(timeout=5 * DEADLINE, **options) as client:
            return await asyncio.gather(*(answer(client, body) for body in bodies.values()))

    with ThreadPoolExecutor(1) as thread, StepGate(server) as gate:
        found = thread.submit(lambda: asyncio.run(together()))
        wait_until(lambda: server.engine.num_unfinished == len(bodies) or found.done(), 5 * DEADLINE)
        gate.open()
        return dict(zip(bodies, found.result(), strict=True))


def check(body: dict[str, Any], got: dict[str, Any]) -> None:
    choice, calls = body["tool_choice"], got["calls"]
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
    one = bool(named) or body["parallel_tool_calls"] is False
    if got["reason"] == "length":  # free text, an object without a schema, more and more calls, or only blanks in one
        assert choice == "auto" or (not one if calls else got["text"])
        calls = calls[:-1]
    else:
        assert got["reason"] == ("tool_calls" if calls and not named else "stop")
        assert calls or choice == "auto"
        assert choice == "auto" or got["text"] == ""
        if "response_format" in body and not calls:
            schema = body["response_format"]["json_schema"]["schema"]
            jsonschema.Draft202012Validator(schema).validate(json.loads(got["text"]))
    assert len(calls) <= 1 or not one
    for name, arguments in calls:
        assert name in tools if named is None else name == named
        function, value = tools[name], json.loads(arguments)
        assert isinstance(value, dict)
        if choice != "auto" or function["strict"]:
            empty = {"additionalProperties": False}
            jsonschema.Draft202012Validator(function["parameters"] or empty).validate(value)


@pytest.mark.parametrize("seeds", [range(14), pytest.param(range(14, 80), marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [pytest.param(demo_with_tools, marks=pytest.mark.slow), thinking_model])
def test_every_answer_is_what_its_request_requires(tmp_path: Path, make: Any, seeds: range) -> None:
    bodies = {seed: random_request(seed, make) for seed in seeds}
    with crowded_server(make(tmp_path), BLOCKS[make]) as server:
        for seed, got in answers(server, bodies).items():
            try:
                check(bodies[seed], got)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {bodies[seed]} was answered by {got}") from error
        server.wait_idle(DEADLINE)
        assert server.engine.stats is not None
        assert server.engine.stats.scheduler.preemptions_total > 0
