"""The endpoints of OpenAI's API that make text and embeddings."""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette

from mlxpaged.api.endpoint import Api, delete, generates, get, post, reads
from mlxpaged.api.openai import chat, completions, embeddings
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.beginning import ResponseBeginning
from mlxpaged.api.openai.responses.schema import InputTokensRequest, ItemList, ResponseRequest
from mlxpaged.api.openai.responses.store import ResponseStore
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest

ENDPOINTS = (
    generates("/v1/chat/completions", chat.respond, "Answer a conversation", ChatRequest, begin=chat.ChatBeginning),
    generates(
        "/v1/completions",
        completions.respond,
        "Continue one or more prompts",
        CompletionRequest,
        begin=completions.CompletionBeginning,
    ),
    generates(
        "/v1/responses",
        responses.respond,
        "Answer, and remember the conversation",
        ResponseRequest,
        begin=ResponseBeginning,
    ),
    reads("/v1/responses/input_tokens", responses.input_tokens, "Count a conversation's tokens", InputTokensRequest),
    get("/v1/responses/{response_id}", responses.retrieve, "A stored response"),
    delete("/v1/responses/{response_id}", responses.delete, "Delete a stored response"),
    get("/v1/responses/{response_id}/input_items", responses.input_items, "Input items of a response", query=ItemList),
    post("/v1/responses/{response_id}/cancel", responses.cancel, "Always refused: no response runs in the background"),
    reads(
        "/v1/embeddings",
        embeddings.respond,
        "Embed texts or tokens",
        embeddings.EmbeddingsRequest,
        answer=embeddings.EmbeddingsResponse,
        cancellable=True,
    ),
)


def start(app: Starlette) -> AbstractAsyncContextManager[None]:
    app.state.responses = ResponseStore()
    return contextlib.nullcontext()


API = Api(ENDPOINTS, start=start)
