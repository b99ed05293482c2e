"""Handles POST /v1/embeddings, with the embedding model, or with the served model if it makes embeddings too."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.errors import bad_parameter, model_not_found
from mlxpaged.api.fields import embeddings as fields
from mlxpaged.api.generation.request_context import choose_id
from mlxpaged.api.openai.schema import Seconds, one_kind_of_input
from mlxpaged.api.schema import Body
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import EmbeddingRequest, EngineInfo, RequestCancelledError
from mlxpaged.models import EmbeddingModel

logger = logging.getLogger(__name__)

MAX_INPUTS = 2048
"""OpenAI's service has the same limit."""
MAX_SLICE = 100_000
"""The tokenizer's thread takes this many characters at a time, and serves other requests in between."""


class EmbeddingsRequest(Body):
    table = fields.TABLE

    model: str | None = None
    input: Annotated[list[str] | list[list[int]], one_kind_of_input("input", MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    timeout: Seconds | None = None
    user: str | None = None


class Embedding(Body):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a string is the base64 of little-endian float32


class EmbeddingsUsage(Body):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Body):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


async def respond(request: Request, body: EmbeddingsRequest) -> Response:
    server = server_of(request)
    engine, info = server.ready(None)
    model = embedding_model(server, info, body.model)
    dimensions = check_dimensions(model, body.dimensions)
    opened = server.open_requests.open(choose_id(request, "embd"), 1, caller_of(request))
    try:
        with engine.reserve(1) as arrival_time:
            inputs = await tokens_of(server, model, body.input)
            await server.prepare(request, lambda: check_tokens(model, inputs))
        if opened.cancelled:
            raise RequestCancelledError("the request was cancelled")
        num_tokens = sum(map(len, inputs))
        opened.submitted = True
        opened.count(num_tokens)
        timeout = engine.config.request_timeout if body.timeout is None else body.timeout
        vectors = await engine.embed(EmbeddingRequest(opened.request_id, inputs, dimensions), arrival_time, timeout)
    finally:
        server.open_requests.close(opened)
    seconds = engine.clock() - arrival_time
    logger.info("%s embeddings=%d prompt_tokens=%d seconds=%.3f", opened.request_id, len(inputs), num_tokens, seconds)
    pieces = in_pieces(model.name, vectors, num_tokens, body.encoding_format == "base64")
    return StreamingResponse(pieces, media_type="application/json")


def embedding_model(server: Server, info: EngineInfo, name: str | None) -> EmbeddingModel:
    """Raises ApiError with the reason if the model of that name makes no embeddings."""
    model = info.embedding_model
    if model is not None and name in (None, model.name):
        return model
    if name not in (None, info.model):
        raise model_not_found(name or "", server.model_names)
    if model is not None:
        message = f"{info.model!r} generates text; use {model.name!r} for embeddings"
    else:
        message = (
            f"{info.model!r} cannot be used for embeddings, because {info.no_embeddings_because}; start the server "
            "with --embedding-model to load a second model for them"
        )
    raise bad_parameter("model", message, code="embeddings_not_supported")


def check_dimensions(model: EmbeddingModel, asked: int | None) -> int:
    """Raises ApiError if the model was not trained for embeddings of this size."""
    if asked is None or asked == model.dimensions:
        return model.dimensions
    if asked < model.dimensions and model.spec.can_be_cut_to(asked):
        return asked
    sizes = model.spec.matryoshka
    if isinstance(sizes, bool):
        known = f"at most {model.dimensions}" if sizes else f"{model.dimensions} (its config.json names no other size)"
    else:
        known = " or ".join(map(str, sorted({*sizes, model.dimensions})))
    raise bad_parameter("dimensions", f"must be {known} for {model.name!r}", code="unsupported_dimensions")


async def tokens_of(server: Server, model: EmbeddingModel, inputs: list[str] | list[list[int]]) -> list[list[int]]:
    """Raises ApiError for a text that is too long, if possible before it is tokenized."""
    found: list[list[int]] = []
    for part in slices(inputs):
        for index, each in enumerate(part, len(found)):
            if isinstance(each, str):
                check_length(model, index, model.tokenizer.least_tokens(len(each)), "at least ")
        found += await server.tokenize(partial(encode, model, part))
    return found


def slices(inputs: Sequence[str | list[int]]) -> Iterator[Sequence[str | list[int]]]:
    """Yields inputs of at most MAX_SLICE characters or tokens together, or one longer input."""
    start = size = 0
    for index, each in enumerate(inputs):
        if index > start and size + len(each) > MAX_SLICE:
            yield inputs[start:index]
            start, size = index, 0
        size += len(each)
    yield inputs[start:]


def encode(model: EmbeddingModel, inputs: Sequence[str | list[int]]) -> list[list[int]]:
    return [each if isinstance(each, list) else model.tokenizer.encode(model.spec.prompt + each) for each in inputs]


def check_tokens(model: EmbeddingModel, inputs: Sequence[Sequence[int]]) -> None:
    """Raises ApiError for an input that the model does not accept."""
    for index, tokens in enumerate(inputs):
        check_length(model, index, len(tokens))
        if not tokens:
            raise bad_parameter("input", f"the input at index {index} has no tokens")
        if max(tokens) >= model.vocab_size:
            message = f"token id {max(tokens)} is not in the vocabulary of {model.vocab_size} tokens"
            raise bad_parameter("input", message)


def check_length(model: EmbeddingModel, index: int, num_tokens: int, about: str = "") -> None:
    if num_tokens > model.max_tokens:
        limit = f"the limit of {model.name!r} is {model.max_tokens} (--embedding-max-model-len or its context length)"
        message = f"the input at index {index} has {about}{num_tokens} tokens; {limit}"
        raise bad_parameter("input", message, code="context_length_exceeded")


async def in_pieces(model: str, vectors: np.ndarray[Any, Any], num_tokens: int, as_base64: bool) -> AsyncIterator[str]:
    """Yields the answer one embedding at a time: encoding all at once would block other streams for seconds."""
    yield '{"object":"list","data":['
    for index, vector in enumerate(vectors):
        values = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        yield ("," if index else "") + dumps({"object": "embedding", "index": index, "embedding": values})
        await asyncio.sleep(0)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    yield f'],"model":{dumps(model)},"usage":{dumps(usage)}}}'


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
