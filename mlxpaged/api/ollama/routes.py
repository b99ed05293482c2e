"""Handles POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.embeddings import Embeddings, embed
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

ID_PREFIX = "ollama"


async def chat(request: Request, body: OllamaChatRequest) -> Response:
    name = served_name(request, body.model)
    server_of(request).ready(name)
    if not body.messages:
        return loaded(body, message("", {}))
    answers = await start(request, lambda: translate_chat(body, name), ID_PREFIX)
    return await reply(answers, ChatRenderer(answers, body), body.streams)


async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
    name = served_name(request, body.model)
    _, info = server_of(request).ready(name)
    if not body.prompt:
        return loaded(body, {"response": ""})
    answers = await start(request, lambda: translate_prompt(body, name, info.tokenizer), ID_PREFIX)
    return await reply(answers, GenerateRenderer(answers, body), body.streams)


def loaded(body: GeneratingFields, said: dict[str, Any]) -> Response:
    """Answers a request that only asks to load or unload the model. The model stays loaded in any case."""
    end = {"done": True, "done_reason": "unload" if body.unloads else "load"}
    return JSONResponse({"model": body.model, "created_at": timestamp(), **said, **end})


async def embed_inputs(request: Request, body: OllamaEmbedRequest) -> Response:
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not any(inputs):
        server_of(request).ready(None)
        return JSONResponse({"model": body.model, "embeddings": []})
    name = served_name(request, body.model)
    found = await embed(request, name, inputs, body.dimensions, truncate=body.truncate is not False)
    fields = {"model": body.model, "embeddings": await vectors_of(request, found)}
    times = {"total_duration": nanoseconds(found.seconds), "load_duration": 0}
    return JSONResponse(fields | times | {"prompt_eval_count": found.num_tokens})


async def embed_prompt(request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """Handles the older endpoint, for one text."""
    if not body.prompt:
        server_of(request).ready(None)
        return JSONResponse({"embedding": []})
    found = await embed(request, served_name(request, body.model), [body.prompt], truncate=True)
    [vector] = await vectors_of(request, found)
    return JSONResponse({"embedding": vector})


async def vectors_of(request: Request, found: Embeddings) -> list[list[float]]:
    vectors: list[list[float]] = await server_of(request).prepare(request, found.vectors.tolist)
    return vectors
