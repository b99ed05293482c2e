"""Builds the Starlette application: routes, middleware and error handlers. The engine thread ends with it."""

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

from mlxpaged.api import ignored_fields
from mlxpaged.api.access.local_names import LOCAL_ORIGIN
from mlxpaged.api.access.middleware import KeyCheck, Origins, RequestLimit
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.endpoints import APIS, ENDPOINTS, OPEN_PATHS
from mlxpaged.api.errors import HANDLED, NO_RETRY, Errors, handle_api_error, handle_http_exception
from mlxpaged.api.request_id import RequestIds
from mlxpaged.api.server import Server
from mlxpaged.api.web import files as web
from mlxpaged.registry.registry import Registry

logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (
    "X-Request-Id",
    "Request-Id",
    "Retry-After",
    "Retry-After-Ms",
    *NO_RETRY,
    ignored_fields.HEADER,
    *(f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")),
)
"""Scripts in pages can read these headers. Browsers hide almost all headers that CORS does not name."""


def create_app(
    registry: Registry | None,
    clock: Callable[[], float] = time.monotonic,
    http: HttpConfig | None = None,
    data_dir: Path | None = None,
) -> Starlette:
    """Returns an ASGI app whose lifespan stops the engine thread, and starts it if it has not started yet.

    registry: None for a server without a model. clock: seconds. data_dir: the directory of files and batches; None for
    a server without them.

    Raises KeyFileError; DirectoryInUseError or OSError if the directory cannot be used.
    """
    server = Server(registry, clock, http or HttpConfig())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if registry is not None:
            if registry.loop is None:
                registry.start()
            registry.watch()
        async with contextlib.AsyncExitStack() as stack:
            for context in contexts:
                await stack.enter_async_context(context)
            yield
            if registry is None or registry.loaded:  # after a failed start there is nothing to stop
                logger.info("HTTP closed; stopping the engine thread")
        await server.close()

    app = Starlette(
        routes=[*(route for endpoint in ENDPOINTS for route in endpoint.routes()), *web.routes()],
        middleware=middleware(server),
        exception_handlers={HTTPException: handle_http_exception, **dict.fromkeys(HANDLED, handle_api_error)},
        lifespan=lifespan,
    )
    app.state.endpoints = ENDPOINTS
    app.state.server = server
    app.state.data_dir = data_dir
    contexts = [api.start(app) for api in APIS.values()]
    return app


def middleware(server: Server) -> list[Middleware]:
    """Returns the middleware from the outside in. Each may rely on the ones before it. CORS preflights need no key."""
    http = server.http
    cors = Middleware(
        CORSMiddleware,
        allow_origins=http.cors_origins,
        allow_origin_regex=LOCAL_ORIGIN.pattern,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )
    return [
        Middleware(RequestIds),
        Middleware(Errors),
        Middleware(Origins, hosts=http.allowed_hosts, origins=http.cors_origins),
        cors,
        Middleware(Errors),  # a page can read the errors of the rest only if they have the headers of CORS
        Middleware(RequestLimit, limit=http.max_connections, open_paths=OPEN_PATHS),
        Middleware(KeyCheck, keys=server.keys, open_paths=OPEN_PATHS),
    ]
