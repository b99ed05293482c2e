"""The server's own API: models, tokens, reranking, status, the page."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette

from mlxpaged.api import downloadable, openapi, requests, rerank, status, status_stream, tokenize
from mlxpaged.api.anthropic import models as anthropic_models
from mlxpaged.api.endpoint import HTML, TEXT, Access, Api, by_header, delete, get, post, reads
from mlxpaged.api.openai import models
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.server import Server
from mlxpaged.api.streaming import EVENTS
from mlxpaged.api.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from mlxpaged.api.web import files as web

ENDPOINTS = (
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
    reads(
        "/apply-template",
        tokenize.apply_template,
        "The prompt that a chat completion would have",
        ChatRequest,
        answer=DetokenizeResponse,
    ),
    get("/tokenizer_info", tokenize.tokenizer_info, "The tokenizer's tokens and template", answer=TokenizerInfo),
    # The id is a path, so that an empty id gets a 404 and no redirect to the endpoint that ends all requests.
    delete("/v1/requests/{request_id:path}", requests.cancel, "End one request that is being answered"),
    delete("/v1/requests", requests.cancel_all, "End every request that is being answered"),
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


def start(app: Starlette) -> AbstractAsyncContextManager[None]:
    server: Server = app.state.server
    app.state.status_stream = status_stream.StatusStream(server)
    return contextlib.nullcontext() if server.keys is None else server.keys.usage.saved()


API = Api(ENDPOINTS, start=start)
