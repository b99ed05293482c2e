"""Random schemas, together in the batch, at temperature 1: every output parses and validates."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from tests.api.helpers import DEADLINE
from tests.api.schemas import random_schema, unbounded_schema
from tests.support import RunningServer


def answers(server: RunningServer, schemas: dict[int, dict[str, Any]]) -> dict[int, Any]:
    """By seed: the text of an answer to each schema and why it ended. Every other one is streamed."""

    async def one(client: AsyncOpenAI, seed: int, schema: dict[str, Any]) -> tuple[str, str | None]:
        completion: Any = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Repeat: {seed}"}],
            response_format={"type": "json_schema", "json_schema": {"name": "fuzz", "schema": schema}},
            temperature=1,
            max_tokens=700,
            seed=seed,
            stream=seed % 2 == 0,
        )
        if seed % 2:
            return completion.choices[0].message.content, completion.choices[0].finish_reason
        text, reason = "", None
        async for chunk in completion:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def together() -> list[Any]:
        # A client's grammars wait for turns: more of them than may wait are refused, and asked for again.
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 20}
        async with AsyncOpenAI(timeout=5 * DEADLINE, **options) as client:
            return await asyncio.gather(*(one(client, seed, schema) for seed, schema in schemas.items()))

    return dict(zip(schemas, asyncio.run(together()), strict=True))


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)])
def test_every_output_of_a_random_schema_parses_and_validates(demo_server: RunningServer, seeds: range) -> None:
    schemas = {seed: random_schema(seed) for seed in seeds}
    for seed, (text, reason) in answers(demo_server, schemas).items():
        where = f"seed {seed}: {schemas[seed]}"
        assert reason == "stop", where
        value = json.loads(text)
        jsonschema.Draft202012Validator(schemas[seed]).validate(value)
    demo_server.wait_idle(DEADLINE)


FORMATS = jsonschema.FormatChecker(["email"])
TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
FORMATS.checks("time")(lambda text: not isinstance(text, str) or re.fullmatch(TIME, text, re.I) is not None)
FORMATS.checks("date-time")(
    lambda text: not isinstance(text, str) or re.fullmatch(rf"\d{{4}}-[01]\d-[0-3]\dT{TIME}", text, re.I) is not None
)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(6, 50), range(50, 100)])
def test_what_may_go_on_for_ever_validates_where_it_ends(demo_server: RunningServer, seeds: range) -> None:
    schemas = {seed: unbounded_schema(seed) for seed in seeds}
    ended = 0
    for seed, (text, reason) in answers(demo_server, schemas).items():
        where = f"seed {seed}: {schemas[seed]} was answered by {text}"
        assert reason in ("stop", "length"), where
        if reason == "stop":
            ended += 1
            errors = jsonschema.Draft202012Validator(schemas[seed], format_checker=FORMATS).iter_errors(
                json.loads(text)
            )
            assert not list(errors), where
    assert ended >= len(seeds) // 3
    demo_server.wait_idle(DEADLINE)
