"""Handles GET /v1/models and /v1/models/{model}, and POST to load and unload a model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import ApiError, load_failed, no_room
from mlxpaged.api.models import (
    describe,
    describe_as,
    known_model,
    models_for,
    on_disk,
)
from mlxpaged.api.server import server_of
from mlxpaged.registry.errors import LoadFailedError, ModelBusyError, NoRoomError


async def list_models(request: Request) -> Response:
    """The models that are served, then those that are on this machine and are loaded if a request names them."""
    server = server_of(request)
    found = await on_disk(request, server)
    served = [describe_as(model, name, server) for model in models_for(request, server) for name in model.names]
    return JSONResponse({"object": "list", "data": served + [describe(model) for model in found]})


async def get_model(request: Request) -> Response:
    server = server_of(request)
    model, name = await known_model(request, server, request.path_params["model"])
    return JSONResponse(describe_as(model, name, server))


async def load(request: Request) -> Response:
    """Answers when the model is loaded. A model that failed is loaded anew."""
    server = server_of(request)
    model = await server.model(request, request.path_params["model"])
    try:
        await server.started().loader.load(model)
    except LoadFailedError as error:
        raise load_failed(model.name, error) from None
    except NoRoomError as error:
        raise no_room(model.name, error) from None
    await server.started().names.look()
    return JSONResponse(describe(model))


async def unload(request: Request) -> Response:
    """A model that runs requests is not unloaded."""
    server = server_of(request)
    model = await server.model(request, request.path_params["model"])
    try:
        await server.started().loader.unload(model)
    except ModelBusyError as error:
        raise ApiError(409, f"model: {error}", param="model", code="model_busy") from None
    await server.started().names.look()
    return JSONResponse(describe(model))
