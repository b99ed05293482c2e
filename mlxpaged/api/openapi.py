"""Handles GET /openapi.json, which describes the endpoints by the pydantic models that check their bodies."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged import __version__
from mlxpaged.api.endpoint import JSON, Access, Endpoint
from mlxpaged.api.error_format import FORMATS, format_of
from mlxpaged.api.generation.request_context import PROGRESS_HEADER, TIMELINE_HEADER
from mlxpaged.api.request_id import HEADER, VALID

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""A server with --api-keys needs one of them."""

ID = {"type": "string", "pattern": VALID.pattern.replace(r"\Z", "$")}
ANY_ID = {"type": "string", "description": "The answer has this id, or a new one if this one is not valid"}
SWITCH = {"type": "string", "enum": ["0", "1"]}
RETRY_AFTER = {"Retry-After": {"description": "Seconds", "schema": {"type": "string"}}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None  # the field at fault
    code: str | None  # tells errors apart, for programs


class ErrorResponse(BaseModel):
    error: ErrorDetail


async def openapi(request: Request) -> Response:
    state = request.app.state
    return Response(rendered(state.endpoints, state.server.keys is not None), media_type=JSON)


@functools.lru_cache(maxsize=2)
def rendered(endpoints: tuple[Endpoint, ...], needs_key: bool) -> bytes:
    """Kept, because making the document holds up the event loop for 0.1 s."""
    return bytes(JSONResponse(document(endpoints, needs_key)).body)


def document(endpoints: Iterable[Endpoint], needs_key: bool) -> dict[str, Any]:
    """Returns an OpenAPI 3.1 document."""
    ordered = sorted(endpoints, key=public_path)
    used = {model for endpoint in ordered for model in (endpoint.body, endpoint.query, endpoint.answer) if model}
    models: set[type[BaseModel]] = used | {ErrorResponse, *(form.model for form in FORMATS)}
    _, schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ordered:
        paths.setdefault(public_path(endpoint), {})[endpoint.method.lower()] = operation(endpoint, schemas["$defs"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxpaged", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SECURITY_SCHEMES},
        "security": [*([] if needs_key else [{}]), *({name: []} for name in SECURITY_SCHEMES)],
    }


def public_path(endpoint: Endpoint) -> str:
    """Returns the path without Starlette's converters."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", endpoint.path)


def operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    form = format_of(endpoint.path)
    error = ErrorResponse if form is None else form.model
    is_open = endpoint.access is Access.OPEN
    answer = ref(endpoint.answer) if endpoint.answer_type == JSON else {"type": "string"}
    # Events have no schema: it would describe each event's data, and OpenAI's last event, [DONE], is not JSON.
    events: dict[str, Any] = {} if endpoint.streams is None else {endpoint.streams: {}}
    responses: dict[str, Any] = {
        "200": {"description": "OK", "content": {endpoint.answer_type: {"schema": answer}} | events},
        **{str(status.value): answer_of(status.phrase, error) for status in errors(endpoint)},
        "503": answer_of(HTTPStatus.SERVICE_UNAVAILABLE.phrase, endpoint.answer if is_open else error),
        "default": answer_of("An error", error),
    }
    if "429" in responses:
        responses["429"]["headers"] = RETRY_AFTER
    query = schemas[endpoint.query.__name__]["properties"] if endpoint.query is not None else {}
    parameters = [
        *(parameter(name, "path", {"type": "string"}) for name in re.findall(r"{(\w+)", endpoint.path)),
        *(parameter(name, "query", schema) for name, schema in query.items()),
        parameter(HEADER, "header", ID if endpoint.cancellable else ANY_ID),
        *(parameter(name, "header", SWITCH) for name in (TIMELINE_HEADER, PROGRESS_HEADER) if endpoint.streams),
    ]
    described: dict[str, Any] = {"summary": endpoint.summary, "responses": responses, "parameters": parameters}
    if is_open:
        described["security"] = []
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": {endpoint.body_type: {"schema": ref(endpoint.body)}}}
    return described


def errors(endpoint: Endpoint) -> list[HTTPStatus]:
    """Returns the error statuses of an endpoint, beside 503, that the document describes one by one."""
    found = [HTTPStatus.FORBIDDEN]
    if endpoint.access is not Access.OPEN:
        found.append(HTTPStatus.UNAUTHORIZED)
    if endpoint.body is not None:
        found += [HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE]
    if endpoint.method == "POST":
        found.append(HTTPStatus.TOO_MANY_REQUESTS)
    return sorted(found)


def parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def answer_of(description: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": ref(model)}}}


def ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
