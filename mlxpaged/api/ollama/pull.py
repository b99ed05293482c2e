"""Handles POST /api/pull: downloads a model from the hub, and says how far it is."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.downloadable import check_access
from mlxpaged.api.downloads import Download
from mlxpaged.api.errors import ApiError, from_engine
from mlxpaged.api.ollama.models import served_name
from mlxpaged.api.ollama.schema import OllamaPullRequest
from mlxpaged.api.server import server_of
from mlxpaged.api.streaming import LINES, EventStream, error_events, line
from mlxpaged.models.disk import DiskFullError
from mlxpaged.models.errors import HubError, InsufficientMemoryError, ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.sources.short_names import BUNDLED, LATEST, full_name, near_names

PROGRESS_SECONDS = 0.5
"""Seconds between two lines of a stream."""

REPOSITORY = re.compile(r"[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}(:[A-Za-z0-9_.-]{1,96})?")
"""With a quantization of GGUF files, as Ollama's clients write it."""
SUCCESS = {"status": "success"}


async def pull(request: Request, body: OllamaPullRequest) -> Response:
    check_access(request)
    asked = body.model or body.name or ""
    if served_name(request, asked).removesuffix(LATEST) in BUNDLED:
        return EventStream(nothing_to_do(), lambda: None, LINES) if body.streams else JSONResponse(SUCCESS)
    download = server_of(request).downloads.start(repository(asked))
    if body.streams:
        return EventStream(lines(request, download), lambda: None, LINES)
    try:
        async for _ in until_done(request, download):
            pass
    except Exception as error:
        raise refusal(download.name, error) from None
    return JSONResponse(SUCCESS)


def repository(name: str) -> str:
    """Returns the repository that a request names. Raises ApiError if it can be none."""
    found = full_name(name)
    if REPOSITORY.fullmatch(found) is None:
        near = near_names(name.removesuffix(LATEST))
        meant = f"did you mean {', '.join(near)}?" if near else "a repository of the hub is named OWNER/NAME"
        raise ApiError(404, f"model: there is no model named {name!r}; {meant}", param="model", code="model_not_found")
    return found


def refusal(name: str, error: Exception) -> ApiError:
    """Turns the error of a download into an answer. The log has no text of the hub's."""
    no_space = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC
    if isinstance(error, DiskFullError) or no_space:
        return ApiError(507, f"model: {error}", "server_error", "model", "disk_full", reason="the disk is full")
    if isinstance(error, InsufficientMemoryError):
        return ApiError(507, f"model: {error}", "server_error", "model", "insufficient_memory")
    if isinstance(error, HubError):
        reason = "the hub did not send the model"
        return ApiError(502, f"model: {error}", "server_error", "model", "hub_error", reason=reason)
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, f"model: {error}", param="model", code="model_not_found", reason="there is no such model")
    if isinstance(error, UnsupportedModelError):
        return ApiError(400, f"model: {error}", param="model", code="unsupported_model")
    return from_engine(error)


async def lines(request: Request, download: Download) -> AsyncGenerator[str, None]:
    """Yields Ollama's lines. All files count as one layer. Its digest is that of the name: the files are not hashed."""
    digest = hashlib.sha256(download.name.encode()).hexdigest()
    layer = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
    yield line({"status": "pulling manifest"})
    try:
        async for _ in until_done(request, download):
            if download.total:
                completed = await asyncio.to_thread(download.completed)
                yield line({**layer, "total": download.total, "completed": completed})
    except Exception as error:
        yield error_events(refusal(download.name, error), request, LINES)
        return
    yield line(SUCCESS)


async def until_done(request: Request, download: Download) -> AsyncGenerator[None, None]:
    """Yields every PROGRESS_SECONDS until the download has ended. Raises what it ended with, and ApiError if the server
    ends before."""
    while not download.done:
        if server_of(request).is_ending:
            message = "the server is shutting down; another pull goes on with the download"
            raise ApiError(503, message, "server_error", code="draining")
        await download.wait(PROGRESS_SECONDS)
        yield
    download.raise_if_failed()


async def nothing_to_do() -> AsyncGenerator[str, None]:
    yield line({"status": "pulling manifest"})
    yield line(SUCCESS)
