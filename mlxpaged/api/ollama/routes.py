"""Handles POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.embeddings import embed, in_pieces
from mlxpaged.api.generation.answers import reply
from mlxpaged.api.generation.submission import start
from mlxpaged.api.ollama.models import served_name
from mlxpaged.api.ollama.renderer import ChatRenderer, GenerateRenderer, message, nanoseconds, timestamp
from mlxpaged.api.ollama.schema import (
    GeneratingFields,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from mlxpaged.api.ollama.translation import translate_chat, translate_prompt
from mlxpaged.api.server import server_of
from mlxpaged.registry.errors import ModelBusyError

ID_PREFIX = "ollama"


async def chat(request: Request, body: OllamaChatRequest) -> Response:
    name = served_name(request, body.model)
    if not body.messages:
        return await loaded(request, body, name, message("", {}))
    answers = await start(request, lambda: translate_chat(body, name), ID_PREFIX)
    return await reply(answers, ChatRenderer(answers, body), body.streams)


async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    name = served_name(request, body.model)
    if not body.prompt:
        return await loaded(request, body, name, {"response": ""})
    _, info = await server_of(request).ready(request, name)
    answers = await start(request, lambda: translate_prompt(body, name, info.tokenizer), ID_PREFIX)
    return await reply(answers, GenerateRenderer(answers, body), body.streams)


async def loaded(request: Request, body: GeneratingFields, name: str, said: dict[str, Any]) -> Response:
    """Loads or unloads the model, as a request without a prompt asks. A model that runs requests or is pinned stays
    loaded, and a key that is no admin's unloads none."""
    server, caller = server_of(request), caller_of(request)
    if not body.unloads:
        await server.ready(request, name)
    else:
        model = await server.model(request, name)
        if not model.pinned and (caller is None or caller.admin):
            with contextlib.suppress(ModelBusyError):
                await server.started().unload(model)
    end = {"done": True, "done_reason": "unload" if body.unloads else "load"}
    return JSONResponse({"model": body.model, "created_at": timestamp(), **said, **end})


async def embed_inputs(request: Request, body: OllamaEmbedRequest) -> Response:
    inputs = [body.input] if isinstance(body.input, str) else body.input
    name = served_name(request, body.model)
    if not body.input:
        await server_of(request).embedder(request, name)
        return JSONResponse({"model": body.model, "embeddings": []})
    found = await embed(request, name, inputs, body.dimensions, truncate=body.truncate is not False)
    times = {"total_duration": nanoseconds(found.seconds), "load_duration": 0}
    others = {"model": body.model, **times, "prompt_eval_count": found.num_tokens}
    vectors = (vector.tolist() for vector in found.vectors)
    return StreamingResponse(in_pieces("embeddings", vectors, others), media_type=JSONResponse.media_type)


async def embed_prompt(request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """Handles the older endpoint, for one text."""
    name = served_name(request, body.model)
    if not body.prompt:
        await server_of(request).embedder(request, name)
        return JSONResponse({"embedding": []})
    found = await embed(request, name, [body.prompt], truncate=True)
    return JSONResponse({"embedding": found.vectors[0].tolist()})
