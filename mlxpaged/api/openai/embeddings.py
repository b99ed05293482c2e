"""Handles POST /v1/embeddings, with the embedding model, or with the served model if it makes embeddings too."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlxpaged.api.embeddings import MAX_INPUTS, embed
from mlxpaged.api.fields import embeddings as fields
from mlxpaged.api.openai.schema import Seconds, one_kind_of_input
from mlxpaged.api.schema import Body


class EmbeddingsRequest(Body):
    table = fields.TABLE

    model: str | None = None
    input: Annotated[list[str] | list[list[int]], one_kind_of_input("input", MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
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
    found = await embed(request, body.model, body.input, body.dimensions, body.timeout, prompt_name=body.prompt_name)
    pieces = in_pieces(found.model.name, found.vectors, found.num_tokens, body.encoding_format == "base64")
    return StreamingResponse(pieces, media_type="application/json")


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
