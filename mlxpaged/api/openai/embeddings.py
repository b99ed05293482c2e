"""Handles POST /v1/embeddings, with the embedding model, or with the served model if it makes embeddings too."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlxpaged.api.embeddings import MAX_INPUTS, Vector, embed, in_pieces
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
    as_base64 = body.encoding_format == "base64"

    def entry(index: int, vector: Vector) -> dict[str, Any]:
        values = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
        return {"object": "embedding", "index": index, "embedding": values}

    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
    others = {"object": "list", "model": found.model.name, "usage": usage}
    entries = (entry(*each) for each in enumerate(found.vectors))
    return StreamingResponse(in_pieces("data", entries, others), media_type="application/json")
