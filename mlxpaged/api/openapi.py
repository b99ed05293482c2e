"""GET /openapi.json: the routes of the app, described by the pydantic models that check their bodies.

A route that is not described in OPERATIONS is an error here, so that none can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlxpaged import __version__
from mlxpaged.api.access.guards import OPEN_PATH
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.batches.records import BatchRecord, FileRecord
from mlxpaged.api.batches.routes import BatchCreate, BatchList, FileList, FileUpload
from mlxpaged.api.generation.request_context import TIMELINE_HEADER
from mlxpaged.api.openai.embeddings import EmbeddingsRequest, EmbeddingsResponse
from mlxpaged.api.openai.responses.schema import InputTokensRequest, ItemList, ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.request_id import HEADER, VALID
from mlxpaged.api.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
FORM, BYTES = "multipart/form-data", "application/octet-stream"


class ErrorDetail(BaseModel):
    """param: the field at fault. code: which error it is, for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class JsonObject(BaseModel):
    """An answer whose fields are those of the API that it follows."""

    model_config = {"extra": "allow"}


@dataclass(frozen=True)
class Operation:
    """body, answer: models of the request's body and of a 200's. media: what a 200 can be. query: parameters of the
    URL, as the fields of a model. headers: of the request, beside its id. has_name: whether it can be cancelled by its
    id, which then has to be of the right form. error: what errors look like. unavailable: the answer of a 503 that is
    none of these."""

    summary: str
    body: type[BaseModel] | None = None
    body_media: str = JSON
    answer: type[BaseModel] = JsonObject
    media: tuple[str, ...] = (JSON,)
    query: type[BaseModel] | None = None
    headers: tuple[str, ...] = ()
    has_name: bool = False
    error: type[BaseModel] = ErrorResponse
    unavailable: type[BaseModel] | None = None

    @property
    def models(self) -> Iterator[type[BaseModel]]:
        found = (self.body, self.answer, self.query, self.error, self.unavailable)
        yield from (model for model in found if model is not None)


def generates(summary: str, body: type[BaseModel], error: type[BaseModel] = ErrorResponse) -> Operation:
    return Operation(summary, body, media=(JSON, EVENTS), headers=(TIMELINE_HEADER,), has_name=True, error=error)


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): generates("Answer a conversation", ChatRequest),
    ("POST", "/v1/completions"): generates("Continue one or more prompts", CompletionRequest),
    ("POST", "/v1/embeddings"): Operation(
        "The embeddings of texts or tokens", EmbeddingsRequest, answer=EmbeddingsResponse, has_name=True
    ),
    ("POST", "/v1/responses"): generates("Answer, and remember the conversation", ResponseRequest),
    ("POST", "/v1/responses/input_tokens"): Operation("The number of tokens of a conversation", InputTokensRequest),
    ("GET", "/v1/responses/{response_id}"): Operation("A stored response"),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Forget a response"),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation("What a response answered", query=ItemList),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation("Refused with a 400: none is made in the background"),
    ("POST", "/v1/messages"): generates(
        "Answer a conversation, as Anthropic's API does", MessagesRequest, AnthropicErrorResponse
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "The number of tokens of a conversation", CountTokensRequest, error=AnthropicErrorResponse
    ),
    ("GET", "/v1/models"): Operation("The models that are served"),
    ("GET", "/v1/models/{model}"): Operation("One model"),
    ("POST", "/tokenize"): Operation(
        "The tokens of a prompt or a conversation", TokenizeRequest, answer=TokenizeResponse
    ),
    ("POST", "/detokenize"): Operation("The text of tokens", DetokenizeRequest, answer=DetokenizeResponse),
    ("DELETE", "/v1/requests/{request_id}"): Operation("End one request that is being answered"),
    ("DELETE", "/v1/requests"): Operation("End every request that is being answered"),
    ("POST", "/v1/files"): Operation("Upload a file", FileUpload, body_media=FORM, answer=FileRecord),
    ("GET", "/v1/files"): Operation("Files, the newest first", query=FileList),
    ("GET", "/v1/files/{file_id}"): Operation("One file", answer=FileRecord),
    ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file"),
    ("GET", "/v1/files/{file_id}/content"): Operation("What is in a file", media=(BYTES,)),
    ("POST", "/v1/batches"): Operation("Run the requests of a file", BatchCreate, answer=BatchRecord),
    ("GET", "/v1/batches"): Operation("Batches, the newest first", query=BatchList),
    ("GET", "/v1/batches/{batch_id}"): Operation("One batch", answer=BatchRecord),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("Cancel a batch", answer=BatchRecord),
    ("GET", "/v1/status"): Operation("Requests and memory in the engine"),
    ("POST", "/v1/cache/clear"): Operation("Empty the prefix cache"),
    ("GET", "/health"): Operation("Whether requests are taken", unavailable=JsonObject),
    ("GET", "/metrics"): Operation("Prometheus metrics", media=(TEXT,)),
    ("GET", "/openapi.json"): Operation("This document"),
}


SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Of a server with --api-keys: one of them is enough."""

NAME = {"type": "string", "pattern": VALID.pattern.replace(r"\Z", "$")}
ANY_NAME = {"type": "string", "description": "Comes back, or a new one where it is not of the form of an id"}
RETRY_AFTER = {"Retry-After": {"description": "Seconds", "schema": {"type": "string"}}}


async def openapi(request: Request) -> Response:
    return JSONResponse(document(request.app.routes, request.app.state.server.keys is not None))


def document(routes: Iterable[BaseRoute], needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1. Raises KeyError for a route that OPERATIONS does not describe."""
    models = {model for operation in OPERATIONS.values() for model in operation.models}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path in sorted(served(routes), key=lambda each: each[1]):
        paths.setdefault(path, {})[method.lower()] = described(method, path, schemas["$defs"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxpaged", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SECURITY_SCHEMES},
        "security": [*([] if needs_key else [{}]), *({name: []} for name in SECURITY_SCHEMES)],
    }


def served(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, its path without Starlette's converters. HEAD comes with every GET."""
    for route in routes:
        assert isinstance(route, Route), route
        for method in (route.methods or set()) - {"HEAD"}:
            yield method, re.sub(r"{(\w+):\w+}", r"{\1}", route.path)


def described(method: str, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    operation = OPERATIONS[method, path]
    content = {media: content_of(media, operation.answer) for media in operation.media}
    responses: dict[str, Any] = {
        "200": {"description": "OK", "content": content},
        **{str(status.value): answer_of(status.phrase, operation.error) for status in errors(method, path, operation)},
        "503": answer_of(HTTPStatus.SERVICE_UNAVAILABLE.phrase, operation.unavailable or operation.error),
        "default": answer_of("An error", operation.error),
    }
    if "429" in responses:
        responses["429"]["headers"] = RETRY_AFTER
    description: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if path == OPEN_PATH:
        description["security"] = []
    parameters = [
        *(parameter(name, "path", {"type": "string"}, required=True) for name in re.findall(r"{(\w+)}", path)),
        *query_parameters(operation, schemas),
        parameter(HEADER, "header", NAME if operation.has_name else ANY_NAME),
        *(parameter(name, "header", {"type": "string", "enum": ["0", "1"]}) for name in operation.headers),
    ]
    description["parameters"] = parameters
    if operation.body is not None:
        content = {operation.body_media: {"schema": ref(operation.body)}}
        description["requestBody"] = {"required": True, "content": content}
    return description


def errors(method: str, path: str, operation: Operation) -> list[HTTPStatus]:
    """Those that a client has to expect, beside what its input or the engine is to blame for."""
    found = [HTTPStatus.FORBIDDEN]
    if path != OPEN_PATH:
        found.append(HTTPStatus.UNAUTHORIZED)
    if operation.body is not None:
        found += [HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE]
    if method == "POST":
        found.append(HTTPStatus.TOO_MANY_REQUESTS)
    return sorted(found)


def query_parameters(operation: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    return [
        parameter(name, "query", schema) for name, schema in schemas[operation.query.__name__]["properties"].items()
    ]


def parameter(name: str, where: str, schema: dict[str, Any], required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema}


def content_of(media: str, answer: type[BaseModel]) -> dict[str, Any]:
    """A schema of events would be one of the data of each, which here ends with a [DONE] that is no JSON."""
    return {JSON: {"schema": ref(answer)}, EVENTS: {}}.get(media, {"schema": {"type": "string"}})


def answer_of(description: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": ref(model)}}}


def ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
