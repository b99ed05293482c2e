"""The Starlette application: routes, error handlers, and the engine's life with the server's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from mlxpaged.api import health
from mlxpaged.api.errors import HANDLED, handle_api_error, handle_http_exception
from mlxpaged.api.openai import chat, completions, models
from mlxpaged.api.server import Server
from mlxpaged.engine import EngineConfig

logger = logging.getLogger(__name__)


def create_app(config: EngineConfig | None) -> Starlette:
    """An ASGI app that starts its engine with its lifespan. config: None for a server without a model.

    `app.state.server.engine` is the AsyncEngine.
    """
    server = Server(config)

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
            Route("/health", health.health, methods=["GET"]),
            Route("/metrics", health.metrics, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: handle_http_exception,
            Exception: handle_api_error,
            **dict.fromkeys(HANDLED, handle_api_error),
        },
        lifespan=lifespan,
    )
    app.state.server = server
    return app
