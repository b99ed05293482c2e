"""Handles the requests of Ollama's API about models and the server: tags, ps, show, version and the refused ones."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import ApiError
from mlxpaged.api.models import created_at, known_model, models_for, on_disk
from mlxpaged.api.ollama.renderer import timestamp
from mlxpaged.api.ollama.schema import OllamaShowRequest
from mlxpaged.api.server import server_of
from mlxpaged.api.web import files as web
from mlxpaged.models.file_facts import LATEST_TIME
from mlxpaged.models.sources.short_names import LATEST
from mlxpaged.registry.model import Model

VERSION = "0.13.5"
"""The version of Ollama whose API these endpoints follow. Some clients refuse older ones."""
NEVER = "9999-12-31T23:59:59.000000Z"
KNOWN = {
    "completions": "completion",
    "vision": "vision",
    "tools": "tools",
    "infill": "insert",
    "thinking": "thinking",
    "embeddings": "embedding",
}
"""Ollama's names of capabilities."""


def served_name(request: Request, name: str) -> str:
    """Returns the name of a served model without the tag that Ollama adds. Other names stay as they are."""
    registry = server_of(request).registry
    model = None if registry is None else registry.names.served(name)
    if registry is None or model is None:
        return name
    if (profile := registry.names.profile_in(name)) is not None:
        return profile.name
    adapter = registry.names.adapter_in(name)
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
    others = [entry(model, model.name) for model in await on_disk(request, server)]
    served = [entry(model, name) for model in models_for(request, server) for name in model.names]
    return JSONResponse({"models": served + others})


async def ps(request: Request) -> Response:
    """The loaded models."""
    server, running = server_of(request), []
    if (registry := server.registry) is None:
        return JSONResponse({"models": []})
    await registry.names.look()
    for model in models_for(request, server):
        if model.is_loaded and (facts := model.facts) is not None:
            expiry = moment_after(registry.seconds_left(model))
            more = {"size_vram": model.memory_bytes, "expires_at": expiry, "context_length": facts.max_model_len}
            running += [entry(model, name) | more for name in model.names]
    return JSONResponse({"models": running})


def moment_after(seconds: float) -> str:
    """seconds: from now on."""
    moment = time.time() + seconds
    return NEVER if moment >= LATEST_TIME else timestamp(moment)


async def show(request: Request, body: OllamaShowRequest) -> Response:
    """A model that is not loaded is not loaded for this: its files tell."""
    model, shown = await known_model(request, server_of(request), body.model or body.name or "")
    facts, files = model.facts, model.files
    details = details_of(model) | {"parent_model": "" if shown == model.name else model.name}
    family = details["family"]
    told: dict[str, Any] = {"general.architecture": family, "general.basename": shown}  # Copilot shows the name
    if files is not None and files.num_parameters is not None:
        told["general.parameter_count"] = files.num_parameters
    if facts is not None:
        told[f"{family}.context_length"] = facts.max_model_len
    if facts is not None and facts.dimensions is not None:
        told[f"{family}.embedding_length"] = facts.dimensions
    return JSONResponse(
        {
            "modelfile": f"FROM {model.name}\n",
            "parameters": "",
            "template": "" if facts is None else facts.template,
            "details": details,
            "model_info": told,
            "capabilities": capabilities_of(model),
            "modified_at": timestamp(created_at(model)),
        }
    )


async def refuse(request: Request) -> Response:
    message = "this server cannot make or delete models; use `mlxpaged rm`"
    raise ApiError(400, f"{request.url.path}: {message}")


def entry(model: Model, name: str) -> dict[str, Any]:
    """A model in a list. name: of the model, or with an adapter. The digest is that of the name, because the weights
    are not hashed."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(created_at(model)),
        "size": model.size_bytes or 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details_of(model) | {"parent_model": "" if name == model.name else model.name},
        "capabilities": capabilities_of(model),
    }


def capabilities_of(model: Model) -> list[str]:
    """Empty if it is not known what the model can do."""
    can = {} if model.facts is None else capabilities(model.facts)
    return [shown for ours, shown in KNOWN.items() if can.get(ours)]


def details_of(model: Model) -> dict[str, Any]:
    """Texts are empty if the files do not tell, or are not known."""
    files = model.files
    family = "" if files is None else files.family
    count = None if files is None else files.num_parameters
    return {
        "format": "gguf" if files is not None and files.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "" if count is None else parameters(count),
        "quantization_level": "" if files is None else files.quantization,
    }


def parameters(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
