"""The description of the API at /openapi.json: complete, and consistent in itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.openai.schema import SamplingFields
from tests.api.helpers import ask, bearer, raw, run_on, write_keys
from tests.support import RunningServer, running_server

OPEN = {"/", "/docs", "/health"}
"""These paths need no key."""


@pytest.fixture
def described(demo_server: RunningServer) -> dict[str, Any]:
    with raw(demo_server) as client:
        response = client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_every_endpoint_is_routed_and_described_and_nothing_else_is(
    demo_server: RunningServer, described: dict[str, Any]
) -> None:
    listed = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    routed = {
        (method, route.path.replace(":path}", "}"))
        for route in demo_server.app.routes
        if isinstance(route, Route) and not route.path.startswith("/web/")  # the files of the page
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert len(listed) == len(ENDPOINTS)
    short = {(method, path.removeprefix("/v1")) for method, path in listed if path.startswith("/v1/")}
    assert listed | short == routed
    assert not listed & short


def test_paths_without_their_version_are_the_same_endpoints(demo_server: RunningServer) -> None:
    body = ask("x", max_tokens=1)
    with raw(demo_server) as client:
        chat = client.post("/chat/completions", json=body).json()
        message = client.post("/messages", json=body)
        models = client.get("/models").json()
        assert client.get("/models/demo").json() == models["data"][0]
        assert models == client.get("/v1/models").json()
        refusal = client.post("/messages", json={})
        assert client.get("/chat").status_code == 404
    assert chat["choices"][0]["finish_reason"] == "length"
    assert message.json()["type"] == "message"
    assert message.headers["request-id"] == message.json()["id"]
    assert (refusal.status_code, refusal.json()["type"]) == (400, "error")


def test_a_server_with_keys_says_so_and_that_one_is_not_needed_for_its_health(
    described: dict[str, Any], tmp_path: Path
) -> None:
    either = [{"bearer": []}, {"apiKey": []}]
    assert described["security"] == [{}, *either]
    key = write_keys(tmp_path / "keys.json", anna={})["anna"]
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    with running_server(None, http=http) as server, raw(server) as client:
        found = client.get("/openapi.json", headers=bearer(key)).json()
    assert found["security"] == either
    assert set(found["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert {path for path, each in found["paths"].items() if each.get("get", {}).get("security") == []} == OPEN


def test_ids_have_a_form_where_another_one_is_refused(demo_server: RunningServer, described: dict[str, Any]) -> None:
    """Requests for text can be cancelled by theirs; others get one that is theirs to read."""
    chat = ask("x", max_tokens=1)
    bodies = {
        ("post", "/v1/chat/completions"): chat,
        ("post", "/v1/completions"): run_on("x", 1),
        ("post", "/v1/responses"): {"input": "x"},
        ("post", "/v1/messages"): chat,
        ("post", "/tokenize"): {"prompt": "x"},
        ("get", "/v1/models"): None,
    }
    with raw(demo_server) as client:
        for (method, path), body in bodies.items():
            listed = described["paths"][path][method]["parameters"]
            schema = next(each["schema"] for each in listed if each["name"] == "X-Request-Id")
            response = client.request(method, path, json=body, headers={"X-Request-Id": "a b"})
            assert response.status_code == (400 if "pattern" in schema else 200)
            assert response.headers["x-request-id"] != "a b"


def test_the_errors_of_keys_and_limits_are_listed_where_they_can_come(described: dict[str, Any]) -> None:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            listed = set(operation["responses"])
            assert "403" in listed
            assert ("401" in listed) == (path not in OPEN)
            assert ({"400", "408", "413"} <= listed) == ("requestBody" in operation)
            assert ("429" in listed) == (method == "post")


def test_every_field_of_the_bodies_is_listed(described: dict[str, Any]) -> None:
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            content = described["paths"][endpoint.path][endpoint.method.lower()]["requestBody"]["content"]
            name = content[endpoint.body_type]["schema"]["$ref"].rsplit("/", 1)[1]
            schema = described["components"]["schemas"][name]
            assert set(schema["properties"]) == set(endpoint.body.model_fields)
            if issubclass(endpoint.body, SamplingFields):
                assert "additionalProperties" not in schema


def test_every_operation_says_what_an_error_looks_like(described: dict[str, Any]) -> None:
    error = described["components"]["schemas"]["ErrorDetail"]["properties"]
    assert set(error) == {"message", "type", "param", "code"}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
            formats = {
                "/v1/messages": "AnthropicErrorResponse",
                "/api/": "OllamaErrorResponse",
                "/v1/systemone": "OllamaErrorResponse",
                "/v1/decisions": "DecisionErrorResponse",
            }
            format = next((name for start, name in formats.items() if path.startswith(start)), "ErrorResponse")
            assert schema == {"$ref": f"#/components/schemas/{format}"}


def test_what_generates_can_be_asked_for_a_timeline(described: dict[str, Any]) -> None:
    timed, streamed = set(), set()
    for path, methods in described["paths"].items():
        operation = methods.get("post", {"parameters": [], "responses": {"200": {"content": {}}}})
        if any(parameter["name"] == "X-Mlxpaged-Timeline" for parameter in operation["parameters"]):
            timed.add(path)
        if {"text/event-stream", "application/x-ndjson"} & set(operation["responses"]["200"]["content"]):
            streamed.add(path)
    openai = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    assert timed == streamed - {"/api/pull"} == {*openai, "/v1/messages", "/api/chat", "/api/generate"}


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for key, value in node.items() if key == "$ref")
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from references(child)

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(references(described)) <= known
