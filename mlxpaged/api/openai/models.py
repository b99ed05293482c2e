"""Handles GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import model_not_found
from mlxpaged.api.server import Server, server_of


async def list_models(request: Request) -> Response:
    server = server_of(request)
    return JSONResponse({"object": "list", "data": [describe(server, name) for name in server.model_names]})


async def get_model(request: Request) -> Response:
    server, name = server_of(request), request.path_params["model"]
    if name not in server.model_names:
        raise model_not_found(name, server.model_names)
    return JSONResponse(describe(server, name))


def describe(server: Server, name: str) -> dict[str, Any]:
    """context_length: the model's own limit. max_model_len: the server's limit, of a prompt and its answer (the KV pool
    may be smaller) or of an input for embeddings. sampling_defaults: parameters of requests that do not set them.
    parent: the model that an adapter belongs to."""
    assert server.engine is not None
    assert server.engine.info is not None
    info = server.engine.info
    embedding = info.embedding_model if info.embedding_model is not None and info.embedding_model.name == name else None
    generates = name in info.generating
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "mlxpaged",
        **({"parent": info.model} if name in info.adapters else {}),
        "context_length": info.context_length if generates or embedding is None else embedding.context_length,
        "max_model_len": info.max_model_len if generates or embedding is None else embedding.max_tokens,
        "capabilities": capabilities(info, name),
        **({"sampling_defaults": info.sampling_defaults} if generates else {}),
        **({} if embedding is None else {"embedding_dimensions": embedding.dimensions}),
    }
