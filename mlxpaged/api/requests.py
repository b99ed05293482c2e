"""Handles DELETE /v1/requests/{id} and /v1/requests. A key that is not an admin key can end only its own requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import may_use
from mlxpaged.api.errors import ApiError
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.request_id import RESPONSE_PREFIX
from mlxpaged.api.server import Server, server_of


async def cancel(request: Request) -> Response:
    """Ends a request, by the id of its response or of one of its choices. All choices end together. Several that wait
    for their models may have the same id, and for an admin key also those of several keys."""
    server, request_id = server_of(request), request.path_params["request_id"]
    by_response = request_id.removeprefix(RESPONSE_PREFIX)

    def theirs(name: str) -> list[OpenRequest]:
        return [each for each in server.open_requests.named(name) if may_use(request, each.owner)]

    ended = await end(server, theirs(request_id) or theirs(by_response))
    if not ended:
        message = f"no unfinished request has the id {request_id!r}"
        raise ApiError(404, message, param="id", code="request_not_found")
    return JSONResponse(ended[0])


async def cancel_all(request: Request) -> Response:
    server = server_of(request)
    theirs = [each for each in server.open_requests if may_use(request, each.owner)]
    return JSONResponse({"object": "list", "data": await end(server, theirs)})


async def end(server: Server, requests: Sequence[OpenRequest]) -> list[dict[str, Any]]:
    """End the unfinished ones of these requests, and describe them. A request that waits for its model, or whose prompt
    is still being tokenized, never reaches the engine, and one that goes on submits nothing more."""
    if not requests or server.registry is None:
        return []
    for request in requests:
        request.cancel()
    ended = await server.registry.cancel([name for request in requests for name in request.names])
    choices = {each.request_id: each for each in ended}
    descriptions = []
    for request in requests:
        found = [
            {"id": shown, "status": choices[name].status.value, "completion_tokens": choices[name].num_output_tokens}
            for shown, name in zip(request.shown, request.names, strict=True)
            if name in choices
        ]
        if found or request.goes_on or not request.submitted:
            described = {"id": request.request_id, "object": "request", "cancelled": True, "choices": found}
            descriptions.append(described)
    return descriptions
