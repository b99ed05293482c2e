"""The Starlette application: routes, error handlers, and the engine's life with the server's."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mlxpaged.api import health, requests, status
from mlxpaged.api.access.guards import KeyCheck, Origins, RequestLimit
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.errors import HANDLED, handle_api_error, handle_http_exception, handle_unexpected_error
from mlxpaged.api.openai import chat, completions, models
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
    config: EngineConfig | None, clock: Callable[[], float] = time.monotonic, http: HttpConfig | None = None
) -> Starlette:
    """An ASGI app that starts its engine with its lifespan. config: None for a server without a model. clock: seconds.

    `app.state.server.engine` is the AsyncEngine. Raises KeyFileError.
    """
    server = Server(config, clock, http or HttpConfig())

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if server.engine is not None:
            server.engine.start()
        yield
        logger.info("HTTP closed; stopping the engine thread")
        await server.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/models", models.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
            # A path, so that no id at all is an unknown one, and not redirected to the route that ends all.
            Route("/v1/requests/{request_id:path}", requests.cancel, methods=["DELETE"]),
            Route("/v1/requests", requests.cancel_all, methods=["DELETE"]),
            Route("/v1/status", status.status, methods=["GET"]),
            Route("/v1/cache/clear", status.clear_cache, methods=["POST"]),
            Route("/health", health.health, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
        ],
        middleware=middleware(server),
        exception_handlers={
            HTTPException: handle_http_exception,
            Exception: handle_unexpected_error,
            **dict.fromkeys(HANDLED, handle_api_error),
        },
        lifespan=lifespan,
    )
    app.state.server = server
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
        Middleware(RequestLimit, most=http.max_connections),
        Middleware(KeyCheck, keys=server.keys),
    ]
