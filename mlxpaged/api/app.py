"""The Starlette application: routes, error handlers, and the engine's life with the server's."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mlxpaged.api import health, openapi, requests, status, tokenize
from mlxpaged.api.access.guards import KeyCheck, Origins, RequestLimit
from mlxpaged.api.anthropic import messages
from mlxpaged.api.batches import BatchLane, Store
from mlxpaged.api.batches import routes as batches
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.errors import HANDLED, UnexpectedErrors, handle_api_error, handle_http_exception
from mlxpaged.api.openai import chat, completions, embeddings, models
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.store import ResponseStore
from mlxpaged.api.request_id import RequestIds
from mlxpaged.api.server import Server
from mlxpaged.engine import EngineConfig

logger = logging.getLogger(__name__)


EXPOSED_HEADERS = (
    "X-Request-Id",
    "Retry-After",
    *(f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")),
)
"""To scripts in pages, which otherwise see a few of HTTP's own only."""


def create_app(
    config: EngineConfig | None,
    clock: Callable[[], float] = time.monotonic,
    http: HttpConfig | None = None,
    data_dir: Path | None = None,
) -> Starlette:
    """An ASGI app that starts its engine with its lifespan. config: None for a server without a model. clock: seconds.
    data_dir: where files and batches are kept; None for a server without them.

    `app.state.server.engine` is the AsyncEngine. Raises KeyFileError; DataDirInUseError, OSError or ValueError where
    the directory cannot be used.
    """
    server = Server(config, clock, http or HttpConfig())
    store = None if data_dir is None else Store(data_dir)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        lane = None
        if server.engine is not None:
            server.engine.start()
            lane = app.state.lane = None if store is None else BatchLane(app, server.engine, store)
        yield
        logger.info("HTTP closed; stopping the engine thread")
        if lane is not None:
            await lane.stop()
        await server.close()
        if store is not None:
            store.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/embeddings", embeddings.create, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/v1/models", models.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
            Route("/tokenize", tokenize.tokenize, methods=["POST"]),
            Route("/detokenize", tokenize.detokenize, methods=["POST"]),
            Route("/v1/files", batches.create_file, methods=["POST"]),
            Route("/v1/files", batches.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", batches.get_file, methods=["GET"]),
            Route("/v1/files/{file_id}", batches.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", batches.get_content, methods=["GET"]),
            Route("/v1/batches", batches.create_batch, methods=["POST"]),
            Route("/v1/batches", batches.list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", batches.get_batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=["POST"]),
            # A path, so that no id at all is an unknown one, and not redirected to the route that ends all.
            Route("/v1/requests/{request_id:path}", requests.cancel, methods=["DELETE"]),
            Route("/v1/requests", requests.cancel_all, methods=["DELETE"]),
            Route("/v1/status", status.status, methods=["GET"]),
            Route("/v1/cache/clear", status.clear_cache, methods=["POST"]),
            Route("/health", health.health, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
            Route("/openapi.json", openapi.openapi, methods=["GET"]),
        ],
        middleware=middleware(server),
        exception_handlers={
            HTTPException: handle_http_exception,
            **dict.fromkeys(HANDLED, handle_api_error),
        },
        lifespan=lifespan,
    )
    app.state.server = server
    app.state.store = store
    app.state.responses = ResponseStore()
    return app


def middleware(server: Server) -> list[Middleware]:
    """From the outside in: each may rely on those before it. What CORS answers by itself needs no key."""
    http = server.http
    cors = Middleware(
        CORSMiddleware,
        allow_origins=http.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )
    return [
        Middleware(RequestIds),
        Middleware(Origins, hosts=http.allowed_hosts, origins=http.cors_origins),
        *([cors] if http.cors_origins else []),
        Middleware(UnexpectedErrors),
        Middleware(RequestLimit, most=http.max_connections),
        Middleware(KeyCheck, keys=server.keys),
    ]
