"""Lists all endpoints. The router and /openapi.json are both made from this table."""

from __future__ import annotations

from functools import partial
from typing import Any

from mlxpaged.api import downloadable, openapi, requests, rerank, status, status_stream, tokenize
from mlxpaged.api.anthropic import messages
from mlxpaged.api.anthropic import models as anthropic_models
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.batches import routes as batches
from mlxpaged.api.batches.records import BatchRecord, FileRecord
from mlxpaged.api.endpoint import BYTES, FORM, HTML, TEXT, Access, Endpoint, by_header
from mlxpaged.api.ollama import models as ollama_models
from mlxpaged.api.ollama import pull as ollama_pull
from mlxpaged.api.ollama import renderer as ollama_renderer
from mlxpaged.api.ollama import routes as ollama
from mlxpaged.api.ollama import schema as ollama_schema
from mlxpaged.api.openai import chat, completions, embeddings, models
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.beginning import ResponseBeginning
from mlxpaged.api.openai.responses.schema import InputTokensRequest, ItemList, ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.page import PageQuery
from mlxpaged.api.streaming import EVENTS, LINES, Beginning, Model, Respond, handler
from mlxpaged.api.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from mlxpaged.api.web import files as web

get, post, delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))


def reads(
    path: str,
    respond: Respond[Model],
    summary: str,
    body: type[Model],
    streams: str | None = None,
    begin: type[Beginning] | None = None,
    **options: Any,
) -> Endpoint:
    """Returns an endpoint that reads a body. Its work ends when the client leaves. begin: as in `handler`."""
    return post(path, handler(body, respond, streams, begin), summary, body, streams=streams, **options)


generates = partial(reads, streams=EVENTS, cancellable=True)
answers = partial(reads, streams=LINES, cancellable=True)


ENDPOINTS = (
    generates("/v1/chat/completions", chat.respond, "Answer a conversation", ChatRequest, begin=chat.ChatBeginning),
    generates(
        "/v1/completions",
        completions.respond,
        "Continue one or more prompts",
        CompletionRequest,
        begin=completions.CompletionBeginning,
    ),
    generates(
        "/v1/responses",
        responses.respond,
        "Answer, and remember the conversation",
        ResponseRequest,
        begin=ResponseBeginning,
    ),
    reads("/v1/responses/input_tokens", responses.input_tokens, "Count a conversation's tokens", InputTokensRequest),
    get("/v1/responses/{response_id}", responses.retrieve, "A stored response"),
    delete("/v1/responses/{response_id}", responses.delete, "Delete a stored response"),
    get("/v1/responses/{response_id}/input_items", responses.input_items, "Input items of a response", query=ItemList),
    post("/v1/responses/{response_id}/cancel", responses.cancel, "Always refused: no response runs in the background"),
    generates("/v1/messages", messages.respond, "Answer a conversation, as Anthropic's API does", MessagesRequest),
    reads("/v1/messages/count_tokens", messages.count_tokens, "Count a conversation's tokens", CountTokensRequest),
    reads(
        "/v1/embeddings",
        embeddings.respond,
        "Embed texts or tokens",
        embeddings.EmbeddingsRequest,
        answer=embeddings.EmbeddingsResponse,
        cancellable=True,
    ),
    reads(
        "/v1/rerank",
        rerank.rerank,
        "Order documents by their relevance",
        rerank.RerankRequest,
        answer=rerank.RerankResponse,
        cancellable=True,
    ),
    reads(
        "/v1/score",
        rerank.score,
        "How well texts fit queries",
        rerank.ScoreRequest,
        answer=rerank.ScoreResponse,
        cancellable=True,
    ),
    get(
        "/v1/models",
        by_header(anthropic_models.HEADER, anthropic_models.list_models, models.list_models),
        "The models that are served or on this machine",
    ),
    get(
        "/v1/models/{model:path}",
        by_header(anthropic_models.HEADER, anthropic_models.get_model, models.get_model),
        "One model",
    ),
    post("/v1/models/{model:path}/load", models.load, "Load a model", access=Access.ADMIN),
    post("/v1/models/{model:path}/unload", models.unload, "Unload a model that runs nothing", access=Access.ADMIN),
    get("/v1/downloads", downloadable.list_downloads, "The models that can be downloaded by a short name"),
    reads("/tokenize", tokenize.tokenize, "The tokens of a prompt or a chat", TokenizeRequest, answer=TokenizeResponse),
    reads("/detokenize", tokenize.detokenize, "The text of tokens", DetokenizeRequest, answer=DetokenizeResponse),
    get("/tokenizer_info", tokenize.tokenizer_info, "The tokenizer's tokens and template", answer=TokenizerInfo),
    # The id is a path, so that an empty id gets a 404 and no redirect to the endpoint that ends all requests.
    delete("/v1/requests/{request_id:path}", requests.cancel, "End one request that is being answered"),
    delete("/v1/requests", requests.cancel_all, "End every request that is being answered"),
    post("/v1/files", batches.create_file, "Upload a file", batches.FileUpload, FileRecord, body_type=FORM),
    get("/v1/files", batches.list_files, "Files, the newest first", query=batches.FileList),
    get("/v1/files/{file_id}", batches.get_file, "One file", answer=FileRecord),
    delete("/v1/files/{file_id}", batches.delete_file, "Delete a file"),
    get("/v1/files/{file_id}/content", batches.get_content, "The content of a file", answer_type=BYTES),
    post("/v1/batches", batches.create_batch, "Run the requests of a file", batches.BatchCreate, BatchRecord),
    get("/v1/batches", batches.list_batches, "Batches, the newest first", query=PageQuery),
    get("/v1/batches/{batch_id}", batches.get_batch, "One batch", answer=BatchRecord),
    post("/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch", answer=BatchRecord),
    answers(
        "/api/chat",
        ollama.chat,
        "Answer a conversation, as Ollama's API does",
        ollama_schema.OllamaChatRequest,
        begin=ollama_renderer.ChatBeginning,
    ),
    answers(
        "/api/generate",
        ollama.generate,
        "Answer a prompt, as Ollama's API does",
        ollama_schema.OllamaGenerateRequest,
        begin=ollama_renderer.GenerateBeginning,
    ),
    reads("/api/embed", ollama.embed_inputs, "Embed texts", ollama_schema.OllamaEmbedRequest, cancellable=True),
    reads(
        "/api/embeddings", ollama.embed_prompt, "Embed a text", ollama_schema.OllamaEmbeddingsRequest, cancellable=True
    ),
    get("/api/tags", ollama_models.tags, "The models that are served, and those on this machine"),
    get("/api/ps", ollama_models.ps, "The models that are loaded"),
    reads("/api/show", ollama_models.show, "One model", ollama_schema.OllamaShowRequest),
    get("/api/version", ollama_models.version, "The version of Ollama's API"),
    reads(
        "/api/pull",
        ollama_pull.pull,
        "Download a model, with --allow-downloads",
        ollama_schema.OllamaPullRequest,
        answer_type=LINES,
    ),
    post("/api/push", ollama_models.refuse, "Always refused"),
    post("/api/create", ollama_models.refuse, "Always refused"),
    post("/api/copy", ollama_models.refuse, "Always refused"),
    delete("/api/delete", ollama_models.refuse, "Always refused"),
    get(
        "/",
        ollama_models.root,
        "The page; on the port of --ollama-port: whether Ollama runs",
        answer_type=HTML,
        access=Access.OPEN,
    ),
    get("/docs", web.docs, "This document, readable", answer_type=HTML, access=Access.OPEN),
    get("/v1/status", status.status, "Requests and memory in the engine", access=Access.ADMIN),
    get(
        "/v1/status/stream",
        status_stream.stream,
        "The status twice a second, as events",
        answer_type=EVENTS,
        access=Access.ADMIN,
    ),
    post("/v1/cache/clear", status.clear_cache, "Empty the prefix cache", access=Access.ADMIN),
    get("/health", status.health, "Whether the server takes requests", access=Access.OPEN),
    get("/metrics", status.metrics, "Prometheus metrics", answer_type=TEXT, access=Access.METRICS),
    get("/openapi.json", openapi.openapi, "This document"),
)

OPEN_PATHS = web.PATHS | {endpoint.path for endpoint in ENDPOINTS if endpoint.access is Access.OPEN}
