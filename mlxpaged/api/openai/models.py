"""Handles GET /v1/models and /v1/models/{model}, and POST to load and unload a model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import allows, caller_of
from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import ApiError, load_failed, model_not_found, no_room
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import EmbeddingInfo, EngineInfo
from mlxpaged.registry import LoadFailedError, Model, ModelBusyError, ModelState, NoRoomError

OWNER = "mlxpaged"


async def list_models(request: Request) -> Response:
    """The models that are served, then those that are on this machine and are loaded if a request names them."""
    server = server_of(request)
    served = [describe(model) for model in models_for(request, server)]
    caller = caller_of(request)
    found = [] if server.registry is None else await server.registry.on_disk()
    on_disk = [
        {"id": each.name, "object": "model", "created": 0, "owned_by": OWNER}
        | state_fields(ModelState.AVAILABLE, each.makes_embeddings, each.size_bytes)
        for each in found
        if allows(caller, each.name)
    ]
    return JSONResponse({"object": "list", "data": served + on_disk})


async def get_model(request: Request) -> Response:
    server, name = server_of(request), request.path_params["model"]
    model = None if server.registry is None else server.registry.served(name)
    if model is None or not allows(caller_of(request), model.name):
        raise model_not_found(name, server.names_for(request))
    return JSONResponse(describe(model))


async def load(request: Request) -> Response:
    """Answers when the model is loaded. A model that failed is loaded anew."""
    server = server_of(request)
    model = await server.model(request, request.path_params["model"])
    try:
        await server.started().load(model)
    except LoadFailedError as error:
        raise load_failed(model.name, error) from None
    except NoRoomError as error:
        raise no_room(model.name, error) from None
    return JSONResponse(describe(model))


async def unload(request: Request) -> Response:
    """A model that runs requests is not unloaded."""
    server = server_of(request)
    model = await server.model(request, request.path_params["model"])
    try:
        await server.started().unload(model)
    except ModelBusyError as error:
        raise ApiError(409, f"model: {error}", param="model", code="model_busy") from None
    return JSONResponse(describe(model))


def models_for(request: Request, server: Server) -> list[Model]:
    """The models that are served, and that the caller may use."""
    if server.registry is None:
        return []
    return [server.registry.models[name] for name in server.names_for(request)]


def describe(model: Model) -> dict[str, Any]:
    """context_length: the model's own limit. max_model_len: the server's limit, of a prompt and its answer (the KV pool
    may be smaller) or of an input for embeddings. sampling_defaults: parameters of requests that do not set them."""
    engine = model.engine if model.is_loaded else None
    info, stats = (None, None) if engine is None else (engine.info, engine.stats)
    found: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": 0 if info is None else info.created,
        "owned_by": OWNER,
        **state_fields(model.state, model.config.only_embeds, None if info is None else info.weight_bytes),
        "memory_bytes": model.memory_bytes,
        "pinned": model.pinned,
        "last_used": model.used_at,
        "running": 0 if stats is None else stats.scheduler.running,
        "waiting": 0 if stats is None else stats.scheduler.waiting + stats.embeddings.waiting,
    }
    if (error := model.failure) is not None:
        found["error"] = error
    return found if info is None else found | details(info)


def state_fields(state: ModelState, only_embeds: bool, size_bytes: int | None) -> dict[str, Any]:
    """size_bytes: of the weights; None if it is not known."""
    return {"state": state.value, "kind": "embeddings" if only_embeds else "generate", "size_bytes": size_bytes}


def details(info: EngineInfo | EmbeddingInfo) -> dict[str, Any]:
    """What only a loaded model tells."""
    embedding = info.embedding_model
    return {
        "context_length": info.context_length,
        "max_model_len": info.max_model_len,
        "capabilities": capabilities(info),
        **({"sampling_defaults": info.sampling_defaults} if isinstance(info, EngineInfo) else {}),
        **({} if embedding is None else {"embedding_dimensions": embedding.dimensions}),
    }
