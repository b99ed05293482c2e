"""Handles POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    LoadingFields,
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
    kept = await keeping(request, body, name)
    answers = await start(request, lambda: translate_chat(body, name), ID_PREFIX, kept)
    return await reply(answers, ChatRenderer(answers, body), body.streams)


async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    name = served_name(request, body.model)
    if not body.prompt:
        return await loaded(request, body, name, {"response": ""})
    kept = await keeping(request, body, name)
    _, info = await server_of(request).ready(request, name)
    answers = await start(request, lambda: translate_prompt(body, name, info.tokenizer), ID_PREFIX, kept)
    return await reply(answers, GenerateRenderer(answers, body), body.streams)


async def loaded(request: Request, body: GeneratingFields, name: str, said: dict[str, Any]) -> Response:
    """Loads or unloads the model, as a request without a prompt asks."""
    if not await unloaded(request, body, name):
        kept = await keeping(request, body, name)
        await server_of(request).ready(request, name)
        kept()
    end = {"done": True, "done_reason": "unload" if body.stay == 0 else "load"}
    return JSONResponse({"model": body.model, "created_at": timestamp(), **said, **end})


async def unloaded(request: Request, body: LoadingFields, name: str) -> bool:
    """Unloads the model if a request without a prompt asks for that, or when its requests have ended. Returns whether
    it asks."""
    if body.stay != 0:
        return False
    server, kept = server_of(request), await keeping(request, body, name)
    if kept is not nothing:
        model = await server.model(request, name)
        try:
            await server.started().loader.unload(model)
        except ModelBusyError:
            kept()
    return True


def nothing() -> None:
    """Leaves it to the server how long a model stays loaded."""


async def keeping(request: Request, body: LoadingFields, name: str) -> Callable[[], None]:
    """Returns what is called when the request has ended: from then on, its `keep_alive` counts for the model. That of a
    pinned model, or with a key that is no admin's, is ignored. Raises ApiError or EngineUnavailableError."""
    server, caller, stay = server_of(request), caller_of(request), body.stay
    if stay is None:
        return nothing
    model = await server.model(request, name)
    if model.pinned:
        server.ignore(request, "keep_alive", f"{model.name!r} is pinned, so it stays loaded")
        return nothing
    if caller is not None and not caller.admin:
        server.ignore(request, "keep_alive", f"the key {caller.name!r} is no admin's, and unloads no model")
        return nothing
    return partial(server.started().keep, model, stay)


async def embed_inputs(request: Request, body: OllamaEmbedRequest) -> Response:
    inputs = [body.input] if isinstance(body.input, str) else body.input
    name = served_name(request, body.model)
    if not body.input:
        await embedder_loaded(request, body, name)
        return JSONResponse({"model": body.model, "embeddings": []})
    kept = await keeping(request, body, name)
    try:
        found = await embed(request, name, inputs, body.dimensions, truncate=body.truncate is not False)
    finally:
        kept()
    times = {"total_duration": nanoseconds(found.seconds), "load_duration": 0}
    others = {"model": body.model, **times, "prompt_eval_count": found.num_tokens}
    vectors = (vector.tolist() for vector in found.vectors)
    return StreamingResponse(in_pieces("embeddings", vectors, others), media_type=JSONResponse.media_type)


async def embed_prompt(request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """Handles the older endpoint, for one text."""
    name = served_name(request, body.model)
    if not body.prompt:
        await embedder_loaded(request, body, name)
        return JSONResponse({"embedding": []})
    kept = await keeping(request, body, name)
    try:
        found = await embed(request, name, [body.prompt], truncate=True)
    finally:
        kept()
    return JSONResponse({"embedding": found.vectors[0].tolist()})


async def embedder_loaded(request: Request, body: LoadingFields, name: str) -> None:
    """Loads or unloads the model, as a request without an input asks."""
    if not await unloaded(request, body, name):
        kept = await keeping(request, body, name)
        await server_of(request).embedder(request, name)
        kept()
