"""Who may download models, and GET /v1/downloads: those with a short name, for a list with buttons."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import caller_of, is_local
from mlxpaged.api.errors import ApiError
from mlxpaged.api.server import server_of
from mlxpaged.models.device_memory import free_device_memory, loaded_memory
from mlxpaged.models.files.architectures import known_source
from mlxpaged.models.files.json_files import CONFIG
from mlxpaged.models.sources.downloads import snapshots
from mlxpaged.models.sources.short_names import short_names


async def list_downloads(request: Request) -> Response:
    """allowed: whether the caller may download them with POST /api/pull. memory_bytes: what weights may take if no
    other model is loaded. Other callers than check_caller lets through get no list: it tells of memory and disk."""
    try:
        check_caller(request)
    except ApiError:
        return JSONResponse({"allowed": False, "memory_bytes": None, "data": []})
    allowed = server_of(request).http.allow_downloads
    memory = free_device_memory() + loaded_memory()
    found = await asyncio.to_thread(entries, memory)
    return JSONResponse({"allowed": allowed, "memory_bytes": memory, "data": found})


def entries(memory: int) -> list[dict[str, Any]]:
    """source: of the type's code; None if it is not known. fits: whether the weights fit into so many bytes.
    downloaded: at least in part."""
    return [
        {
            "id": name,
            "repository": row.repository,
            "kind": row.kind.value,
            "source": (source := known_source({"model_type": row.model_type})) and source.value,
            "parameters": round(row.parameters * 1e9),
            "good_for": row.good_for,
            "size_bytes": row.bytes,
            "fits": row.bytes <= memory,
            "downloaded": any((path / CONFIG).exists() for path in snapshots(row.repository)),
        }
        for name, row in short_names().items()
    ]


def check_access(request: Request) -> None:
    """Raises ApiError if the server downloads nothing, or nothing for this caller."""
    if not server_of(request).http.allow_downloads:
        message = "this server does not download models: start it with --allow-downloads, or use `mlxpaged pull`"
        raise ApiError(403, message, "permission_error", code="downloads_not_allowed")
    check_caller(request)


def check_caller(request: Request) -> None:
    """Raises ApiError, unless the caller has an admin key, or the server has no keys and the caller is on its
    machine."""
    caller = caller_of(request)
    if caller is not None and not caller.admin:
        message = f"to download a model needs an admin key; {caller.name!r} is not one"
        raise ApiError(403, message, "permission_error", code="admin_key_required")
    if caller is None and not is_local(request):
        message = "other machines may download models only with an admin key: start the server with --api-keys"
        raise ApiError(403, message, "permission_error", code="downloads_not_allowed")
