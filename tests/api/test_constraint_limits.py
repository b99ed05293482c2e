"""A constraint just beyond a limit gets a 400 in each API, in each field that takes one. Nothing compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpaged.parts.grammar.check import checker
from mlxpaged.parts.grammar.grammar_limits import MAX_OPENINGS
from mlxpaged.parts.grammar.schema_limits import MAX_DEPTH
from tests.api.helpers import raw
from tests.engine.constraints import chain, doubling
from tests.support import RunningServer

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMAS = {
    "schemas in one another": chain("items", MAX_DEPTH + 5),
    "with what its references copy": doubling(60),
}


def in_tool(schema: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "object", "properties": {"a": own}, "$defs": schema["$defs"]}


FIELDS: dict[str, tuple[str, Any]] = {
    "response_format": (
        "/v1/chat/completions",
        lambda s: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}},
    ),
    "guided_json": ("/v1/chat/completions", lambda s: {"guided_json": json.dumps(s)}),
    "tools": (
        "/v1/chat/completions",
        lambda s: {
            "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": in_tool(s)}}],
            "tool_choice": "required",
        },
    ),
    "structured_outputs.json": ("/v1/completions", lambda s: {"structured_outputs": {"json": s}}),
    "text.format": ("/v1/responses", lambda s: {"text": {"format": {"type": "json_schema", "name": "x", "schema": s}}}),
    "output_config.format": (
        "/v1/messages",
        lambda s: {"max_tokens": 2, "output_config": {"format": {"type": "json_schema", "schema": s}}},
    ),
    "input_schema": (
        "/v1/messages",
        lambda s: {
            "max_tokens": 2,
            "tools": [{"name": "f", "strict": True, "input_schema": in_tool(s)}],
            "tool_choice": {"type": "any"},
        },
    ),
    "format": ("/api/chat", lambda s: {"stream": False, "format": s}),
}
PROMPTS = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may get as far as to the compiler."""

    def fail(*_: Any) -> None:
        raise AssertionError("the constraint was compiled")

    monkeypatch.setattr(checker, "check", fail)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("reason", SCHEMAS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_schema_beyond_a_limit_is_refused_in_each_api(demo_server: RunningServer, field: str, reason: str) -> None:
    path, fields = FIELDS[field]
    body = {"model": "demo", **PROMPTS.get(path, {"messages": MESSAGES}), **fields(SCHEMAS[reason])}
    with raw(demo_server) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert reason in (error if isinstance(error, str) else error["message"])


@pytest.mark.usefixtures("no_compiler")
def test_a_grammar_of_too_many_parts_is_refused(demo_server: RunningServer) -> None:
    text = "start: " + "(" * (MAX_OPENINGS + 1)
    for fields in ({"guided_grammar": text}, {"structured_outputs": {"grammar": text}}):
        with raw(demo_server) as client:
            answer = client.post("/v1/completions", json={"model": "demo", "prompt": "Hi", **fields})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_constraint")
        assert f"the limit is {MAX_OPENINGS}" in answer.json()["error"]["message"]
