"""Describes the served models, for the APIs that list them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request

from mlxpaged.api.access.caller import allows, caller_of
from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import model_not_found
from mlxpaged.api.server import Server
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.models.architectures import Source
from mlxpaged.models.kinds import Kind
from mlxpaged.registry.catalog import Found
from mlxpaged.registry.errors import ModelUnknownError
from mlxpaged.registry.model import Model, ModelState

OWNER = "mlxpaged"


def models_for(request: Request, server: Server) -> list[Model]:
    """The models that are served, and that the caller may use."""
    if server.registry is None:
        return []
    caller = caller_of(request)
    return [model for model in server.registry.models.values() if allows(caller, model.name)]


async def on_disk(request: Request, server: Server) -> list[Found]:
    """The models on this machine that are loaded if a request names them, and that the caller may use."""
    found = [] if server.registry is None else await server.registry.on_disk()
    caller = caller_of(request)
    return [each for each in found if allows(caller, each.name)]


async def known_model(request: Request, server: Server, name: str) -> tuple[Model, str | None]:
    """A model that is served or on this machine, also while none can be loaded, and the adapter in its name. Raises
    ApiError."""
    try:
        model = None if server.registry is None else await server.registry.find(name)
    except ModelUnknownError:
        model = None
    if server.registry is None or model is None or not allows(caller_of(request), model.name):
        raise model_not_found(name, server.names_for(request))
    return model, server.registry.adapter_in(name)


def named(name: str, created: int) -> dict[str, Any]:
    """Returns the fields that OpenAI's and Anthropic's APIs have for each model. created: Unix time."""
    moment = f"{datetime.fromtimestamp(created, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    of_anthropic = {"type": "model", "display_name": name, "created_at": moment}
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER, **of_anthropic}


def describe(model: Model) -> dict[str, Any]:
    """context_length: the model's own limit. max_model_len: the server's limit, of a prompt and its answer (the KV pool
    may be smaller) or of an input for embeddings. sampling_defaults: parameters of requests that do not set them."""
    engine = model.engine if model.is_loaded else None
    info, stats = (None, None) if engine is None else (engine.info, engine.stats)
    found: dict[str, Any] = {
        **named(model.name, 0 if info is None else info.created),
        **state_fields(model.state, model.kind, model.source, model.size_bytes if info is None else info.weight_bytes),
        "memory_bytes": model.memory_bytes,
        "pinned": model.pinned,
        "last_used": model.used_at,
        "running": 0 if stats is None else stats.scheduler.running,
        "waiting": 0 if stats is None else stats.scheduler.waiting + stats.embeddings.waiting,
    }
    if (error := model.failure) is not None:
        found["error"] = error
    if model.state is ModelState.LOADING and model.engine is not None and model.engine.progress is not None:
        found["progress"] = str(model.engine.progress)
    return found if info is None else found | details(info)


def describe_adapter(model: Model, adapter: str) -> dict[str, Any]:
    """Describes an adapter as its model, whose state it has. The memory of the model includes that of its adapters."""
    found = describe(model)
    found |= named(f"{model.name}:{adapter}", found["created"]) | {"parent": model.name}
    found |= {"size_bytes": None, "memory_bytes": None}
    if "capabilities" in found:
        found["capabilities"] = found["capabilities"] | {"embeddings": False}
    found.pop("embedding_dimensions", None)
    return found


def state_fields(state: ModelState, kind: Kind, source: Source | None, size_bytes: int | None) -> dict[str, Any]:
    """source: of the type's code. size_bytes: of the weights. Each is None if it is not known."""
    return {"state": state.value, "kind": kind.value, "source": source and source.value, "size_bytes": size_bytes}


def details(info: EngineInfo | EmbeddingInfo) -> dict[str, Any]:
    """What only a loaded model tells."""
    embedding = info.embedding_model
    return {
        "context_length": info.context_length,
        "max_model_len": info.max_model_len,
        "capabilities": capabilities(info),
        **(of_answers(info) if isinstance(info, EngineInfo) else {}),
        **({} if embedding is None else {"embedding_dimensions": embedding.dimensions}),
    }


def of_answers(info: EngineInfo) -> dict[str, Any]:
    """tool_calls: the format in which calls are read, and what tells the model of tools; None if it does not chat."""
    tokenizer = info.tokenizer
    by_message = "system_message" if tokenizer.takes_system else "user_message"
    return {
        "tool_calls": {
            "parser": tokenizer.tags.tools.name,
            "shown_by": "chat_template"
            if tokenizer.shows_tools
            else by_message
            if tokenizer.has_chat_template
            else None,
        },
        "sampling_defaults": info.sampling_defaults,
    }
