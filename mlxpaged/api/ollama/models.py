"""Handles the requests of Ollama's API about models and the server: tags, ps, show, version and the refused ones."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlxpaged.api import web
from mlxpaged.api.capabilities import capabilities
from mlxpaged.api.errors import ApiError, model_not_found
from mlxpaged.api.ollama.renderer import timestamp
from mlxpaged.api.ollama.schema import OllamaShowRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import EngineInfo

VERSION = "0.13.5"
"""The version of Ollama whose API these endpoints follow. Some clients refuse older ones."""
LATEST = ":latest"
"""Ollama adds this tag to a name that has none."""
NEVER = "9999-12-31T23:59:59Z"
KNOWN = {"completions": "completion", "tools": "tools", "thinking": "thinking", "embeddings": "embedding"}
"""Ollama's names of capabilities."""


def served_name(request: Request, name: str) -> str:
    """Returns the name of a served model without the tag that Ollama adds. Other names stay as they are."""
    short = name.removesuffix(LATEST)
    return short if short in server_of(request).model_names else name


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
    server = server_of(request)
    return JSONResponse({"models": [entry(info_of(server), name) for name in server.model_names]})


async def ps(request: Request) -> Response:
    """All served models are loaded, and none is ever unloaded."""
    server = server_of(request)
    running = []
    for name in server.model_names:
        info = info_of(server)
        found = entry(info, name)
        more = {"size_vram": found["size"], "expires_at": NEVER, "context_length": longest(info, name)}
        running.append(found | more)
    return JSONResponse({"models": running})


async def show(request: Request, body: OllamaShowRequest) -> Response:
    server, asked = server_of(request), body.model or body.name or ""
    name = served_name(request, asked)
    if name not in server.model_names:
        raise model_not_found(asked, server.model_names)
    info = info_of(server)
    details = details_of(info, name)
    family = details["family"]
    facts: dict[str, Any] = {"general.architecture": family, f"{family}.context_length": longest(info, name)}
    if name == info.model:
        facts["general.parameter_count"] = info.num_parameters
    if info.embedding_model is not None and name == info.embedding_model.name:
        facts[f"{family}.embedding_length"] = info.embedding_model.dimensions
    can = capabilities(info, name)
    return JSONResponse(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "template": info.tokenizer.template_source if can["chat"] else "",
            "details": details,
            "model_info": facts,
            "capabilities": [shown for ours, shown in KNOWN.items() if can[ours]],
            "modified_at": timestamp(info.created),
        }
    )


async def refuse(request: Request) -> Response:
    message = "this server cannot fetch, make or delete models; its models are chosen when it starts"
    raise ApiError(400, f"{request.url.path}: {message}")


def info_of(server: Server) -> EngineInfo:
    """Returns the facts about the engine, on a server that has model names."""
    assert server.engine is not None
    assert server.engine.info is not None
    return server.engine.info


def entry(info: EngineInfo, name: str) -> dict[str, Any]:
    """digest: of the name, because the weights are not hashed."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(info.created),
        "size": info.weight_bytes if name == info.model else 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details_of(info, name),
    }


def details_of(info: EngineInfo, name: str) -> dict[str, Any]:
    """The embedding model's family and sizes are not known."""
    generates = name == info.model
    family = info.model_type if generates else "embedding"
    bits = info.weight_bytes * 8 / info.num_parameters
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": parameters(info.num_parameters) if generates else "",
        "quantization_level": f"{bits:.1f} bits" if generates else "",
    }


def parameters(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def longest(info: EngineInfo, name: str) -> int:
    """Returns the most tokens of a prompt and its answer on this server, or of an input for embeddings."""
    if name == info.model or info.embedding_model is None:
        return info.max_model_len
    return info.embedding_model.max_tokens
