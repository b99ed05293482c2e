"""Describes the served models, for the APIs that list them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request

from mlxpaged.api.access.caller import allows, caller_of
from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import model_not_found
from mlxpaged.api.server import Server
from mlxpaged.models.file_facts import FileFacts
from mlxpaged.parts.embeddings.embedder import NO_EMBEDDINGS
from mlxpaged.registry.errors import ModelUnknownError
from mlxpaged.registry.facts import Facts
from mlxpaged.registry.model import Model, ModelState

OWNER = "mlxpaged"


def models_for(request: Request, server: Server) -> list[Model]:
    """The models that are served, and that the caller may use."""
    if server.registry is None:
        return []
    caller = caller_of(request)
    return [model for model in server.registry.models.values() if allows(caller, model.name)]


async def on_disk(request: Request, server: Server) -> list[Model]:
    """The models on this machine that are loaded if a request names them, and that the caller may use."""
    found = [] if server.registry is None else await server.registry.names.on_disk()
    caller = caller_of(request)
    return [each for each in found if allows(caller, each.name)]


async def known_model(request: Request, server: Server, name: str) -> tuple[Model, str]:
    """A model that is served or on this machine, also while none can be loaded, and which of its names this is: its
    own, that with an adapter, or that of a profile. Raises ApiError."""
    try:
        model = None if server.registry is None else await server.registry.names.find(name)
    except ModelUnknownError:
        model = None
    if server.registry is None or model is None or not allows(caller_of(request), model.name):
        raise model_not_found(name, server.names_for(request))
    await server.registry.names.look()
    profile, adapter = server.registry.names.profile_in(name), server.registry.names.adapter_in(name)
    if profile is not None:
        return model, profile.name
    return model, model.name if adapter is None else f"{model.name}:{adapter}"


def named(name: str, created: int) -> dict[str, Any]:
    """Returns the fields that OpenAI's and Anthropic's APIs have for each model. created: Unix time."""
    moment = f"{datetime.fromtimestamp(created, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    of_anthropic = {"type": "model", "display_name": name, "created_at": moment}
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER, **of_anthropic}


def describe(model: Model) -> dict[str, Any]:
    """context_length: the model's own limit. max_model_len: the server's limit, of a prompt and its answer (the KV pool
    may be smaller) or of an input for embeddings. sampling_defaults: parameters of requests that do not set them."""
    facts, stats = model.facts, model.engine.stats if model.is_loaded and model.engine is not None else None
    found: dict[str, Any] = {
        **named(model.name, created_at(model)),
        "state": model.state.value,
        "kind": model.kind.value,
        "source": model.source and model.source.value,
        "size_bytes": model.size_bytes,
        "memory_bytes": model.memory_bytes,
        "pinned": model.pinned,
        "last_used": model.used_at,
        "running": 0 if stats is None else stats.scheduler.running,
        "waiting": 0 if stats is None else stats.scheduler.waiting + stats.of(NO_EMBEDDINGS).waiting,
    }
    if (error := model.failure) is not None:
        found["error"] = error
    if model.state is ModelState.LOADING and model.engine is not None and model.engine.progress is not None:
        found["progress"] = str(model.engine.progress)
    return found | described_files(model.files) | ({} if facts is None else details(facts))


def created_at(model: Model) -> int:
    """Unix time of its files, or of its load if they are not known; 0 if neither is."""
    if model.files is not None:
        return model.files.created
    return 0 if model.engine is None or model.engine.info is None else model.engine.info.created


def describe_as(model: Model, name: str, server: Server) -> dict[str, Any]:
    """Describes a model, or an adapter or a profile as its model, whose state it has. The memory of the model includes
    that of its adapters. name: one of the model's names."""
    found = describe(model)
    if name == model.name:
        return found
    found |= named(name, found["created"]) | {"parent": model.name, "size_bytes": None, "memory_bytes": None}
    if server.registry is not None and (profile := server.registry.profiles.get(name)) is not None:
        found["profile"] = profile.shown
        if "sampling_defaults" in found:
            found["sampling_defaults"] = found["sampling_defaults"] | profile.sampling
    elif "capabilities" in found:
        found["capabilities"] = found["capabilities"] | {"embeddings": False}
        found.pop("embedding_dimensions", None)
    return found


def described_files(files: FileFacts | None) -> dict[str, Any]:
    """files: None if they are not known."""
    if files is None:
        return {}
    return {"family": files.family, "parameters": files.num_parameters, "quantization": files.quantization}


def details(facts: Facts) -> dict[str, Any]:
    """What a model can do. tool_calls: the format in which calls are read, and what tells the model of tools; None if
    it does not chat."""
    found: dict[str, Any] = {
        "context_length": facts.context_length,
        "max_model_len": facts.max_model_len,
        "capabilities": capabilities(facts),
    }
    found["meta"] = {"n_ctx": facts.max_model_len, "n_ctx_train": facts.context_length}  # llama.cpp's names
    if facts.generates:
        found["tool_calls"] = {"parser": facts.parser, "shown_by": facts.shown_by}
        found["sampling_defaults"] = facts.sampling
    if facts.dimensions is not None:
        found["embedding_dimensions"] = facts.dimensions
    return found
