"""All endpoints. The router and /openapi.json are both made from this table."""

from __future__ import annotations

from pydantic import BaseModel

from mlxpaged.api import health, openapi, requests, status, tokenize
from mlxpaged.api.anthropic import messages
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.batches import routes as batches
from mlxpaged.api.batches.records import BatchRecord, FileRecord
from mlxpaged.api.batches.routes import BatchCreate, BatchList, FileList, FileUpload
from mlxpaged.api.endpoint import BYTES, FORM, TEXT, Access, Endpoint, Handler
from mlxpaged.api.openai import chat, completions, embeddings, models
from mlxpaged.api.openai.embeddings import EmbeddingsRequest, EmbeddingsResponse
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.schema import InputTokensRequest, ItemList, ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


def generates(path: str, handler: Handler, summary: str, body: type[BaseModel]) -> Endpoint:
    return Endpoint("POST", path, handler, summary, body=body, streams=True, cancellable=True)


ENDPOINTS = (
    generates("/v1/chat/completions", chat.create, "Answer a conversation", ChatRequest),
    generates("/v1/completions", completions.create, "Continue one or more prompts", CompletionRequest),
    generates("/v1/responses", responses.create, "Answer, and remember the conversation", ResponseRequest),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses.input_tokens,
        "The number of tokens of a conversation",
        body=InputTokensRequest,
    ),
    Endpoint("GET", "/v1/responses/{response_id}", responses.retrieve, "A stored response"),
    Endpoint("DELETE", "/v1/responses/{response_id}", responses.delete, "Forget a response"),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses.input_items,
        "The input of a response",
        query=ItemList,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses.cancel,
        "Refused with a 400: no response is made in the background",
    ),
    generates("/v1/messages", messages.create, "Answer a conversation, as Anthropic's API does", MessagesRequest),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "The number of tokens of a conversation",
        body=CountTokensRequest,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.create,
        "The embeddings of texts or tokens",
        body=EmbeddingsRequest,
        answer=EmbeddingsResponse,
        cancellable=True,
    ),
    Endpoint("GET", "/v1/models", models.list_models, "The models that are served"),
    Endpoint("GET", "/v1/models/{model:path}", models.get_model, "One model"),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "The tokens of a prompt or a conversation",
        body=TokenizeRequest,
        answer=TokenizeResponse,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        "The text of tokens",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
    ),
    # A path, so that an empty id is unknown, and is not redirected to the endpoint that ends all requests.
    Endpoint("DELETE", "/v1/requests/{request_id:path}", requests.cancel, "End one request that is being answered"),
    Endpoint("DELETE", "/v1/requests", requests.cancel_all, "End every request that is being answered"),
    Endpoint(
        "POST", "/v1/files", batches.create_file, "Upload a file", body=FileUpload, body_type=FORM, answer=FileRecord
    ),
    Endpoint("GET", "/v1/files", batches.list_files, "Files, the newest first", query=FileList),
    Endpoint("GET", "/v1/files/{file_id}", batches.get_file, "One file", answer=FileRecord),
    Endpoint("DELETE", "/v1/files/{file_id}", batches.delete_file, "Delete a file"),
    Endpoint("GET", "/v1/files/{file_id}/content", batches.get_content, "The content of a file", answer_type=BYTES),
    Endpoint(
        "POST", "/v1/batches", batches.create_batch, "Run the requests of a file", body=BatchCreate, answer=BatchRecord
    ),
    Endpoint("GET", "/v1/batches", batches.list_batches, "Batches, the newest first", query=BatchList),
    Endpoint("GET", "/v1/batches/{batch_id}", batches.get_batch, "One batch", answer=BatchRecord),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch", answer=BatchRecord),
    Endpoint("GET", "/v1/status", status.status, "Requests and memory in the engine", Access.ADMIN),
    Endpoint("POST", "/v1/cache/clear", status.clear_cache, "Empty the prefix cache", Access.ADMIN),
    Endpoint("GET", "/health", health.health, "Whether the server takes requests", Access.OPEN),
    Endpoint("GET", "/metrics", health.metrics, "Prometheus metrics", answer_type=TEXT),
    Endpoint("GET", "/openapi.json", openapi.openapi, "This document"),
)

OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.access is Access.OPEN)
