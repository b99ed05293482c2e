"""Schemas of other programs: what cannot be enforced in them is ignored by name, unless the request is strict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.helpers import raw
from tests.formats.written import WRITTEN
from tests.scripted import scripted_server
from tests.support import RunningServer

FORMATS = ("gemma4", "minimax_m2", "deepseek_v32", "json_tools")
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def one(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"at": schema}, "required": ["at"]}


TEXT = {"type": "string"}
TWO = {"type": "object", "properties": {"at": TEXT, "by": TEXT}}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "format": (one({"type": "string", "format": "date-time"}), ""),
    "own format": (one({"type": "string", "format": "path"}), ""),
    "optional": (one({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}), ""),
    "look-ahead": (one({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}), ""),
    "union": ({"type": "object", "anyOf": [PATH, one(TEXT)]}, "tools.parameters"),
    "limits": (one({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}), "tools.parameters"),
    "few": (TWO | {"minProperties": 2}, "tools.parameters.minProperties"),
    "many": (TWO | {"maxProperties": 1}, "tools.parameters.maxProperties"),
    "as many as there are": (TWO | {"required": ["at"], "minProperties": 1, "maxProperties": 2}, ""),
    "anchor": (one({"$dynamicAnchor": "here", **TEXT}), ""),
    "unique": (one({"type": "array", "items": TEXT, "uniqueItems": True}), "tools.parameters.uniqueItems"),
    "not": (one({"type": "string", "not": {"const": ""}}), "tools.parameters.not"),
    "look-behind": (one({"type": "string", "pattern": "(?<!a)b"}), "tools.parameters.pattern"),
    "branches": (one({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "tools.parameters.oneOf"),
    "names": (
        one({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}),
        "tools.parameters.propertyNames",
    ),
    "if": (one(TEXT) | {"if": {"required": ["at"]}}, "tools.parameters.if"),
    "elsewhere": (one({"$ref": "https://example.com/schema"}), "tools.parameters.$ref"),
    "list": ({"type": "array"}, "tools.parameters"),
}
"""Parameters of a tool, and what is said to be ignored of them."""
OF_TAGS = ("union", "limits", "few", "many")
"""What only formats without JSON cannot express."""
SOME = ("format", "union", "unique", "list")
"""Those whose answers are read to their end."""
STRICT = ("unique", "not", "look-behind", "names", "if", "list")


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    form = request.param
    script = {"ls?": WRITTEN[form]("ls", {"path": "/tmp"})}
    with scripted_server(tmp_path_factory.mktemp("model"), form, script) as server:
        yield server


@pytest.fixture(scope="module")
def json_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    script = {"set?": '{"a": [1, 1]}', "one?": '{"a": "'}
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", script) as server:
        yield server


def functions(odd: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "ls", "parameters": PATH}, {"name": "odd", "parameters": odd, **fields}]


def chat(tools: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "ls?"}], "tool_choice": "required", "temperature": 0}
    offered = [{"type": "function", "function": each} for each in tools]
    return "/v1/chat/completions", {**body, "tools": offered, **fields}


def responses(tools: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    offered = [{"type": "function", "strict": None, **each} for each in tools]
    return "/v1/responses", {"input": "ls?", "tool_choice": "required", "temperature": 0, "tools": offered, **fields}


def messages(tools: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    offered = [{("input_schema" if key == "parameters" else key): each[key] for key in each} for each in tools]
    body = {"messages": [{"role": "user", "content": "ls?"}], "tool_choice": {"type": "any"}, "max_tokens": 300}
    body["temperature"] = 0
    return "/v1/messages", {**body, "tools": offered, **fields}


APIS = {"chat": chat, "responses": responses, "messages": messages}


def send(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    with raw(server) as client:
        return client.post(path, json={"model": "scripted", **body})


def called(api: str, answer: Any) -> list[tuple[str, Any]]:
    if api == "chat":
        calls = answer["choices"][0]["message"]["tool_calls"]
        return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
    if api == "responses":
        calls = [each for each in answer["output"] if each["type"] == "function_call"]
        return [(each["name"], json.loads(each["arguments"])) for each in calls]
    return [(each["name"], each["input"]) for each in answer["content"] if each["type"] == "tool_use"]


@pytest.mark.parametrize("api", APIS)
def test_a_tool_that_cannot_be_enforced_hinders_no_other(
    request: pytest.FixtureRequest, server: RunningServer, api: str
) -> None:
    for name, (odd, named) in ODD.items():
        if api != "chat" and name not in SOME:
            continue
        path, body = APIS[api](functions(odd))
        answer = send(server, path, body if name in SOME else body | {"max_tokens": 1})
        assert answer.status_code == 200, (name, answer.text)
        if name in SOME:
            assert called(api, answer.json()) == [("ls", {"path": "/tmp"})], name
        if name in OF_TAGS and "json_tools" in request.node.name:
            named = ""
        field = "input_schema" if api == "messages" else "parameters"
        assert answer.headers.get("x-mlxpaged-ignored", "") == named.replace("parameters", field), name


@pytest.mark.parametrize("api", APIS)
def test_the_same_in_a_stream(server: RunningServer, api: str) -> None:
    path, body = APIS[api](functions(ODD["unique"][0]), stream=True)
    with raw(server) as client, client.stream("POST", path, json={"model": "scripted", **body}) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
        assert "uniqueItems" in answer.headers["x-mlxpaged-ignored"]
    assert "/tmp" in text.replace("\\", "")


@pytest.mark.parametrize("api", APIS)
def test_a_strict_tool_that_must_be_called_is_refused_with_the_place(server: RunningServer, api: str) -> None:
    for name in STRICT if api == "chat" else STRICT[:1]:
        odd, named = ODD[name]
        path, body = APIS[api](functions(odd, strict=True))
        answer = send(server, path, body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("tools.1: ")
        assert "leave out `strict`" in message
        if name != "list":
            assert f"{named.removeprefix('tools.parameters.')!r} cannot be enforced; it is at" in message


KINDS = {
    "cat": {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]},
    "dog": {"properties": {"kind": {"enum": ["dog", "puppy"]}, "name": {"type": "string"}}, "required": ["kind"]},
}
PETS = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
ELSEWHERE: dict[str, dict[str, Any]] = {
    "a union with a discriminator": one({"oneOf": PETS, "discriminator": {"propertyName": "kind"}}),
    "a list of it": one({"type": "array", "items": {"oneOf": PETS}, "maxItems": 2}),
    "it or null": one({"anyOf": [{"oneOf": PETS}, {"type": "null"}]}),
    "its values": one({"type": "object", "additionalProperties": {"oneOf": PETS}, "maxProperties": 2}),
    "names": one({"type": "object", "propertyNames": {"$ref": "#/$defs/name"}, "maxProperties": 2}),
}
"""What pydantic writes of parts that stand in `$defs`."""


@pytest.mark.parametrize("strict", [True, False])
def test_parts_of_parameters_that_stand_elsewhere_are_enforced(server: RunningServer, strict: bool) -> None:
    definitions = {name: {"type": "object", **kind} for name, kind in KINDS.items()} | {"name": {"enum": ["x", "y"]}}
    for name, schema in ELSEWHERE.items():
        path, body = chat(functions(schema | {"$defs": definitions}, strict=strict), max_tokens=1)
        answer = send(server, path, body)
        assert answer.status_code == 200, (name, answer.text)
        assert "x-mlxpaged-ignored" not in answer.headers, name


SET = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
AS_TEXT: dict[str, tuple[str, Any, str]] = {
    "chat": (
        "/v1/chat/completions",
        lambda schema, **strict: {
            "messages": [{"role": "user", "content": "set?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}},
        },
        "response_format.json_schema.schema",
    ),
    "llama.cpp": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": [{"role": "user", "content": "set?"}],
            "response_format": {"type": "json_object", "schema": schema},
        },
        "response_format.schema",
    ),
    "responses": (
        "/v1/responses",
        lambda schema, **strict: {
            "input": "set?",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, **strict}},
        },
        "text.format.schema",
    ),
    "ollama": (
        "/api/chat",
        lambda schema: {"messages": [{"role": "user", "content": "set?"}], "format": schema, "stream": False},
        "format",
    ),
    "raw": (
        "/api/generate",
        lambda schema: {"prompt": "set?", "raw": True, "format": schema, "stream": False},
        "format",
    ),
}


@pytest.mark.parametrize("api", AS_TEXT)
def test_a_text_whose_schema_need_not_be_strict_has_the_rest_of_it(json_server: RunningServer, api: str) -> None:
    path, body, field = AS_TEXT[api]
    answer = send(json_server, path, body(SET))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mlxpaged-ignored"] == f"{field}.uniqueItems"
    assert '{"a": [1, 1]}' in json.loads(json.dumps(answer.text)).replace("\\", "")


TEXT_B = {"b": {"not": {"type": "string"}}}
LEFT_OUT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "schemas that depend": ({"dependentSchemas": {"a": {"required": ["b"]}}}, ("dependentSchemas",)),
    "look-ahead of names": ({"patternProperties": {"^a(?=b)": {"type": "integer"}}}, ("patternProperties",)),
    "a way into a part": ({"properties": {"a": {"$ref": "#/properties/b/not"}, **TEXT_B}}, ("$ref", "not")),
    "a pattern of names that is none": ({"propertyNames": {"pattern": 7}}, ("propertyNames",)),
    "too many to count": (
        {"properties": {f"p{i}": {} for i in range(300)}, "minProperties": 4},
        ("minProperties",),
    ),
    "patterns of names to count": (
        {"properties": {"a": {}}, "patternProperties": {"^b": {}, "^c": {}}, "maxProperties": 2},
        ("maxProperties",),
    ),
    "a union of names that is none": ({"propertyNames": {"anyOf": 7}}, ("propertyNames",)),
}
"""Schemas of objects, and what is left out of them."""


def test_what_depends_on_what_is_left_out_is_left_out_too(json_server: RunningServer) -> None:
    path, body, field = AS_TEXT["chat"]
    for name, (schema, keywords) in LEFT_OUT.items():
        answer = send(json_server, path, body({"type": "object", **schema}) | {"max_tokens": 1})
        assert answer.status_code == 200, (name, answer.text)
        assert answer.headers["x-mlxpaged-ignored"] == ", ".join(f"{field}.{keyword}" for keyword in keywords), name


def test_a_field_of_two_tools_is_named_once(json_server: RunningServer) -> None:
    path, body = chat([{"name": name, "parameters": SET, "strict": True} for name in "ab"], tool_choice="auto")
    answer = send(json_server, path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mlxpaged-ignored"] == "tools.parameters.uniqueItems"


def test_a_strict_tool_that_need_not_be_called_has_the_rest_of_its_schema(server: RunningServer, request: Any) -> None:
    """What is left out is named, as in required calls."""
    for name, (odd, named) in ODD.items():
        path, body = chat(functions(odd, strict=True), tool_choice="auto", max_tokens=1)
        answer = send(server, path, body)
        assert answer.status_code == 200, (name, answer.text)
        if name in OF_TAGS and "json_tools" in request.node.name:
            named = ""
        elif named == "tools.parameters":
            named = "tools.strict"
        assert answer.headers.get("x-mlxpaged-ignored", "") == named, name


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_strict_schema_is_refused_with_the_place(json_server: RunningServer, api: str) -> None:
    path, body, field = AS_TEXT[api]
    answer = send(json_server, path, body(SET, strict=True))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}: 'uniqueItems' cannot be enforced; it is at 'properties.a'")
    assert "leave out `strict`" in message


def test_anthropics_schemas_are_strict(json_server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "set?"}], "max_tokens": 20}
    form = {"output_config": {"format": {"type": "json_schema", "schema": SET}}}
    answer = send(json_server, "/v1/messages", body | form)
    assert answer.status_code == 400
    assert "'uniqueItems' cannot be enforced; it is at 'properties.a'" in answer.json()["error"]["message"]
