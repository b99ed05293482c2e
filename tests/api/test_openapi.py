"""The description of the API at /openapi.json: complete, and consistent in itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from mlxpaged.api.openai.schema import SamplingFields
from mlxpaged.api.openapi import OPERATIONS, document
from tests.api.helpers import raw
from tests.support import RunningServer


@pytest.fixture
def described(demo_server: RunningServer) -> dict[str, Any]:
    with raw(demo_server) as client:
        response = client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def test_every_route_of_the_app_is_listed_and_nothing_else(
    demo_server: RunningServer, described: dict[str, Any]
) -> None:
    listed = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in demo_server.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert listed == routes == set(OPERATIONS)


def test_a_route_that_is_not_described_is_an_error() -> None:
    with pytest.raises(KeyError, match="/new"):
        document([Route("/new", lambda request: None, methods=["GET"])])


def test_every_field_of_the_bodies_is_listed(described: dict[str, Any]) -> None:
    for (method, path), operation in OPERATIONS.items():
        if operation.body is not None:
            content = described["paths"][path][method.lower()]["requestBody"]["content"]
            name = content[operation.body_media]["schema"]["$ref"].rsplit("/", 1)[1]
            schema = described["components"]["schemas"][name]
            assert set(schema["properties"]) == set(operation.body.model_fields)
            if issubclass(operation.body, SamplingFields):
                assert schema["additionalProperties"] is False


def test_every_operation_says_what_an_error_looks_like(described: dict[str, Any]) -> None:
    error = described["components"]["schemas"]["ErrorDetail"]["properties"]
    assert set(error) == {"message", "type", "param", "code"}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
            format = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
            assert schema == {"$ref": f"#/components/schemas/{format}"}


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for key, value in node.items() if key == "$ref")
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from references(child)

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(references(described)) <= known
