"""Handles GET /v1/models and /v1/models/{model} of Anthropic's clients: what this server can do with a model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import ApiError, render
from mlxpaged.api.models import describe_as, known_model, models_for, on_disk
from mlxpaged.api.server import Server, server_of
from mlxpaged.registry.facts import Facts
from mlxpaged.registry.model import Model

HEADER = "anthropic-version"
"""What only Anthropic's clients send."""

EFFORTS = ("low", "medium", "high", "xhigh", "max")
NEVER = ("batch", "citations", "code_execution", "pdf_input")
"""What no model can do here."""
STRATEGIES = ("clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112")
SERVER_TOOLS = ("code_execution", "web_search")


async def list_models(request: Request) -> Response:
    """All models at once."""
    server = server_of(request)
    others = await on_disk(request, server)
    served = [(model, name) for model in models_for(request, server) for name in model.names]
    data = [described(model, name, server) for model, name in (*served, *((model, model.name) for model in others))]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JSONResponse({"data": data, "has_more": False, "first_id": first, "last_id": last})


async def get_model(request: Request) -> Response:
    try:
        model, name = await known_model(request, server_of(request), request.path_params["model"])
    except ApiError as error:
        return render(error, "/v1/messages", request.state.request_id)
    return JSONResponse(described(model, name, server_of(request)))


def described(model: Model, name: str, server: Server) -> dict[str, Any]:
    """The fields of Anthropic's API, above ours. name: one of the model's names."""
    facts = model.facts
    return describe_as(model, name, server) | {
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "allowed_fallback_models": [],
        "max_input_tokens": None if facts is None else facts.max_model_len,
        "max_tokens": None if facts is None or not facts.generates else facts.max_model_len,
        "capabilities": None if facts is None else capabilities(facts),
    }


def capabilities(facts: Facts) -> dict[str, Any]:
    """A thought can be turned off in any model; one that does not think is answered without."""
    types = {"adaptive": facts.thinks, "between_tools": False, "disabled": facts.chats, "enabled": facts.thinks}
    return {
        **{name: support(False) for name in NEVER},
        "context_management": of_parts(dict.fromkeys(STRATEGIES, False)),
        "effort": of_parts(dict.fromkeys(EFFORTS, facts.thinks)),
        "image_input": support(facts.sees),
        "server_tools": of_parts(dict.fromkeys(SERVER_TOOLS, False)),
        "structured_outputs": support(facts.chats),
        "thinking": support(facts.thinks) | {"types": {name: support(yes) for name, yes in types.items()}},
    }


def support(yes: bool) -> dict[str, Any]:
    return {"supported": yes}


def of_parts(parts: dict[str, bool]) -> dict[str, Any]:
    return support(any(parts.values())) | {name: support(yes) for name, yes in parts.items()}
