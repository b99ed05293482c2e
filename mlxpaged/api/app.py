"""The Starlette application: routes, error handlers, and the engine's life with the server's."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from mlxpaged.api import health, requests, status
from mlxpaged.api.anthropic import messages
from mlxpaged.api.errors import HANDLED, handle_api_error, handle_http_exception, handle_unexpected_error
from mlxpaged.api.openai import chat, completions, models
from mlxpaged.api.request_id import RequestIds
from mlxpaged.api.server import Server
from mlxpaged.engine import EngineConfig

logger = logging.getLogger(__name__)


def create_app(config: EngineConfig | None, clock: Callable[[], float] = time.monotonic) -> Starlette:
    """An ASGI app that starts its engine with its lifespan. config: None for a server without a model. clock: seconds.

    `app.state.server.engine` is the AsyncEngine.
    """
    server = Server(config, clock)

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
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
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
        middleware=[Middleware(RequestIds)],
        exception_handlers={
            HTTPException: handle_http_exception,
            Exception: handle_unexpected_error,
            **dict.fromkeys(HANDLED, handle_api_error),
        },
        lifespan=lifespan,
    )
    app.state.server = server
    return app
