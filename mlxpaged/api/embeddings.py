"""Computes embeddings for the APIs that have endpoints for them: reads texts as tokens, checks them, and waits."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.request_context import choose_id
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.server import Server, program_of, server_of
from mlxpaged.core.engine.errors import RequestCancelledError
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo
from mlxpaged.models.encoders.embedding import EmbeddingFacts
from mlxpaged.models.features import Feature
from mlxpaged.models.files.kinds import Kind
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest
from mlxpaged.parts.embeddings.embedding_passes import Vectors

logger = logging.getLogger(__name__)

MAX_INPUTS = 2048
"""OpenAI's service has the same limit."""
MAX_REQUEST_TOKENS = 300_000
"""Tokens of all inputs together. OpenAI's service has the same limit. Without one, 2,048 long inputs take many minutes,
and no proxy or client waits so long."""
MAX_SLICE = 100_000
"""The tokenizer's thread takes this many characters at a time, and serves other requests in between."""


Vector = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Embeddings:
    """vectors: [inputs, dimensions]. seconds: from the request's arrival to its end."""

    model: EmbeddingFacts
    vectors: Vectors
    num_tokens: int
    seconds: float


async def embed(
    request: Request,
    name: str | None,
    inputs: list[str] | list[list[int]],
    dimensions: int | None = None,
    timeout: float | None = None,
    truncate: bool = False,
    prompt_name: str | None = None,
) -> Embeddings:
    """name: of the model, None for any. dimensions: None for the model's own. timeout: seconds, None for the server's
    default. truncate: whether to cut texts that are too long. prompt_name: of the prompt that is put before every text,
    None for the model's default. Raises ApiError and the engine's errors."""
    server = server_of(request)
    engine, info = await server.embedder(request, name)
    model = embedding_model(server, info)
    size, tokens = check_dimensions(model, dimensions), list[list[int]]()
    if prompt_name is not None and prompt_name not in model.spec.prompts:
        known = f"one of {', '.join(model.spec.prompts)}" if model.spec.prompts else "left out: it names no prompts"
        raise bad_parameter("prompt_name", f"must be {known} for {model.name!r}", code="unknown_prompt")

    async def tokenize() -> None:
        tokens.extend(await tokens_of(request, model, inputs, truncate, prompt_name))
        await server.prepare(request, lambda: check_tokens(model, tokens))

    def made(request_id: str) -> EmbeddingRequest:
        return EmbeddingRequest(request_id, tokens, size, client=program_of(request))

    _, vectors, seconds = await run_embedder(request, engine, "embd", tokenize, made, timeout)
    return Embeddings(model, vectors, sum(map(len, tokens)), seconds)


async def in_pieces(name: str, entries: Iterable[Any], others: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yields an object in JSON, with the entries as a list, one entry at a time: to make all at once would block the
    event loop for seconds. name: of the list. others: the other fields."""
    yield f"{{{dumps(name)}:["
    for index, entry in enumerate(entries):
        yield ("," if index else "") + dumps(entry)
        await asyncio.sleep(0)
    yield "]" + "".join(f",{dumps(key)}:{dumps(value)}" for key, value in others.items()) + "}"


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def run_embedder(
    request: Request,
    engine: AsyncEngine,
    id_prefix: str,
    tokenize: Callable[[], Awaitable[None]],
    made: Callable[[str], EmbeddingRequest],
    timeout: float | None,
) -> tuple[str, Vectors, float]:
    """The id of a request, its vectors, and the seconds from its arrival to its end. tokenize: makes the inputs, once
    there is room in the queue. made: returns the request with an id, after that. Raises ApiError and the engine's
    errors."""
    server = server_of(request)
    opened = server.open_requests.open(OpenRequest(choose_id(request, id_prefix), caller_of(request)), 1, engine)
    try:
        with engine.reserve(1, server.held_beside(opened)) as arrival_time:
            await tokenize()
        if opened.cancelled:
            raise RequestCancelledError("the request was cancelled")
        asked = made(opened.names[0])
        num_tokens = sum(map(len, asked.inputs))
        opened.submit([num_tokens])
        limit = engine.config.request_timeout if timeout is None else timeout
        vectors = await engine.embed(asked, arrival_time, limit)
    finally:
        server.open_requests.close(opened)
    seconds = engine.clock() - arrival_time
    what = opened.request_id, len(asked.inputs), num_tokens, seconds
    logger.info("%s embeddings=%d prompt_tokens=%d seconds=%.3f", *what)
    return opened.request_id, vectors, seconds


def embedding_model(server: Server, info: EngineInfo | EmbeddingInfo) -> EmbeddingFacts:
    """Raises ApiError with the reason if the model makes no embeddings."""
    if info.embedding_model is not None:
        return info.embedding_model
    others = [repr(model.name) for model in server.started().models.values() if model.kind is Kind.EMBEDDING]
    remedy = f"use {' or '.join(others)}" if others else "start the server with --embedding-model to have one for them"
    message = f"{info.model!r} cannot be used for embeddings, because {info.missing[Feature.EMBEDDINGS]}; {remedy}"
    raise bad_parameter("model", message, code="embeddings_not_supported")


def check_dimensions(model: EmbeddingFacts, asked: int | None) -> int:
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
    message = f"must be {known} for {model.name!r}"
    if sizes is False:
        message += ". If it was trained for shorter ones, as Qwen3-Embedding, set is_matryoshka there to true"
    raise bad_parameter("dimensions", message, code="unsupported_dimensions")


async def tokens_of(
    request: Request,
    model: EmbeddingFacts,
    inputs: list[str] | list[list[int]],
    truncate: bool,
    prompt_name: str | None,
) -> list[list[int]]:
    """Raises ApiError for a text that is too long, if possible before it is tokenized."""
    if truncate:
        most = model.tokenizer.most_chars(model.max_tokens)
        inputs = [each[:most] for each in inputs]  # type: ignore[assignment]
    least = sum(model.tokenizer.least_tokens(len(each)) if isinstance(each, str) else len(each) for each in inputs)
    check_total(least, about="at least ")
    found: list[list[int]] = []
    for part in slices(inputs):
        for index, each in enumerate(part, len(found)):
            if isinstance(each, str):
                check_length(model, index, model.tokenizer.least_tokens(len(each)), "at least ")
        size, work = sum(map(len, part)), partial(encode, model, part, truncate, prompt_name)
        found += await server_of(request).tokenize(request, model.tokenizer, size, work)
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


def encode(
    model: EmbeddingFacts, inputs: Sequence[str | list[int]], truncate: bool, prompt_name: str | None
) -> list[list[int]]:
    text, encode = model.spec.text, model.tokenizer.encode
    tokens = [each if isinstance(each, list) else encode(text(each, prompt_name)) for each in inputs]
    return [shortened(model, each) for each in tokens] if truncate else tokens


def shortened(model: EmbeddingFacts, tokens: list[int]) -> list[int]:
    """Returns at most as many tokens as the model takes. The end token that its tokenizer adds stays: the embedding can
    be the state of this token."""
    if len(tokens) <= model.max_tokens:
        return tokens
    ending = model.tokenizer.encode("")[-1:]
    kept = ending if tokens[-1:] == ending else []
    return tokens[: model.max_tokens - len(kept)] + kept


def check_tokens(model: EmbeddingFacts, inputs: Sequence[Sequence[int]]) -> None:
    """Raises ApiError for an input that the model does not accept, or for too many tokens."""
    check_total(sum(map(len, inputs)))
    for index, tokens in enumerate(inputs):
        check_length(model, index, len(tokens))
        if not tokens:
            raise bad_parameter("input", f"the input at index {index} has no tokens")
        if max(tokens) >= model.vocab_size:
            message = f"token id {max(tokens)} is not in the vocabulary of {model.vocab_size} tokens"
            raise bad_parameter("input", message)


def check_total(num_tokens: int, param: str = "input", about: str = "") -> None:
    """Raises ApiError, with the field that has the texts, if they have too many tokens together."""
    if num_tokens > MAX_REQUEST_TOKENS:
        message = f"the inputs have {about}{num_tokens} tokens together; the limit of a request is {MAX_REQUEST_TOKENS}"
        raise bad_parameter(param, message, code="too_many_tokens")


def check_length(model: EmbeddingFacts, index: int, num_tokens: int, about: str = "") -> None:
    if num_tokens > model.max_tokens:
        limit = f"the limit of {model.name!r} is {model.max_tokens} (--embedding-max-model-len or its context length)"
        message = f"the input at index {index} has {about}{num_tokens} tokens; {limit}"
        raise bad_parameter("input", message, code="context_length_exceeded")
