"""POST /v1/embeddings: refused, with the reason.

The engine gives out tokens, not hidden states, and those of a model that was trained to predict the next token are no
measure of meaning whichever way they are pooled. Models that were trained for it (Qwen3-Embedding, for one, whose last
token's state is the embedding) would need a way of their own through the engine.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.server import server_of


async def create(request: Request) -> Response:
    _, info = server_of(request).ready(None)
    message = f"{info.model!r} is served to generate text; this server makes no embeddings"
    raise bad_parameter("model", message, code="embeddings_not_supported")
