"""Handles the requests of Ollama's API about models and the server: tags, ps, show, version and the refused ones."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import ApiError
from mlxpaged.api.models import known_model, models_for, on_disk
from mlxpaged.api.ollama.renderer import timestamp
from mlxpaged.api.ollama.schema import OllamaShowRequest
from mlxpaged.api.server import server_of
from mlxpaged.api.web import files as web
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.models.sources.short_names import LATEST
from mlxpaged.registry.model import Model

VERSION = "0.13.5"
"""The version of Ollama whose API these endpoints follow. Some clients refuse older ones."""
NEVER = "9999-12-31T23:59:59.000000Z"
KNOWN = {
    "completions": "completion",
    "vision": "vision",
    "tools": "tools",
    "thinking": "thinking",
    "embeddings": "embedding",
}
"""Ollama's names of capabilities."""


def served_name(request: Request, name: str) -> str:
    """Returns the name of a served model without the tag that Ollama adds. Other names stay as they are."""
    registry = server_of(request).registry
    model = None if registry is None else registry.served(name)
    if registry is None or model is None:
        return name
    adapter = registry.adapter_in(name)
    return model.name if adapter is None else f"{model.name}:{adapter}"


def tagged(name: str) -> str:
    return name if ":" in name else name + LATEST


async def root(request: Request) -> Response:
    """The page. On the port of --ollama-port, clients look here whether Ollama runs."""
    _, port = request.scope["server"]
    if port == server_of(request).http.ollama_port:
        return PlainTextResponse("Ollama is running")
    return await web.index(request)


async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def tags(request: Request) -> Response:
    """The models that are served, then those that are on this machine and are loaded if a request names them."""
    server = server_of(request)
    others = [listed(each.name, each.size_bytes) for each in await on_disk(request, server)]
    served = [entry(model, name) for model in models_for(request, server) for name in model.names]
    return JSONResponse({"models": served + others})


async def ps(request: Request) -> Response:
    """The loaded models. None has a time at which it will be unloaded."""
    running = []
    for model in models_for(request, server_of(request)):
        if (info := loaded_info(model)) is not None:
            more = {"size_vram": model.memory_bytes, "expires_at": NEVER, "context_length": info.max_model_len}
            running += [entry(model, name) | more for name in model.names]
    return JSONResponse({"models": running})


async def show(request: Request, body: OllamaShowRequest) -> Response:
    """A model that is not loaded is not loaded for this: only its name is known."""
    found, adapter = await known_model(request, server_of(request), body.model or body.name or "")
    info = loaded_info(found)
    details = details_of(info) | {"parent_model": "" if adapter is None else found.name}
    family = details["family"]
    shown = found.name if adapter is None else f"{found.name}:{adapter}"
    facts: dict[str, Any] = {"general.architecture": family, "general.basename": shown}  # Copilot shows the name
    if info is not None:
        facts[f"{family}.context_length"] = info.max_model_len
    if isinstance(info, EngineInfo):
        facts["general.parameter_count"] = info.num_parameters
    if info is not None and info.embedding_model is not None:
        facts[f"{family}.embedding_length"] = info.embedding_model.dimensions
    return JSONResponse(
        {
            "modelfile": f"FROM {found.name}\n",
            "parameters": "",
            "template": info.tokenizer.template_source if info is not None and capabilities(info)["chat"] else "",
            "details": details,
            "model_info": facts,
            "capabilities": capabilities_of(info),
            "modified_at": timestamp(0 if info is None else info.created),
        }
    )


async def refuse(request: Request) -> Response:
    message = "this server cannot make or delete models; use `mlxpaged rm`"
    raise ApiError(400, f"{request.url.path}: {message}")


def loaded_info(model: Model) -> EngineInfo | EmbeddingInfo | None:
    return model.engine.info if model.is_loaded and model.engine is not None else None


def entry(model: Model, name: str) -> dict[str, Any]:
    """name: of the model, or with an adapter."""
    info, parent = loaded_info(model), "" if name == model.name else model.name
    return listed(name, (model.size_bytes or 0) if info is None else info.weight_bytes, info, parent)


def listed(
    name: str, size_bytes: int, info: EngineInfo | EmbeddingInfo | None = None, parent: str = ""
) -> dict[str, Any]:
    """A model in a list. info: None if it is not loaded. The digest is that of the name, because the weights are not
    hashed."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(0 if info is None else info.created),
        "size": size_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details_of(info) | {"parent_model": parent},
        "capabilities": capabilities_of(info),
    }


def capabilities_of(info: EngineInfo | EmbeddingInfo | None) -> list[str]:
    """info: None if the model is not loaded. What it can do is not known then."""
    can = {} if info is None else capabilities(info)
    return [shown for ours, shown in KNOWN.items() if can.get(ours)]


def details_of(info: EngineInfo | EmbeddingInfo | None) -> dict[str, Any]:
    """info: None if the model is not loaded. The embedding model's family and sizes are not known."""
    family, size, bits = "embedding" if isinstance(info, EmbeddingInfo) else "", "", ""
    if isinstance(info, EngineInfo):
        family, size = info.model_type, parameters(info.num_parameters)
        bits = f"{info.checkpoint_bytes * 8 / info.num_parameters:.1f} bits"
    return {
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": bits,
    }


def parameters(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
