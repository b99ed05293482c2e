"""Handles POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.anthropic.renderer import MessageRenderer
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.anthropic.translation import translate
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation import prompt
from mlxpaged.api.generation.answers import reply
from mlxpaged.api.generation.check import ContextLengthError
from mlxpaged.api.generation.submission import start
from mlxpaged.api.server import server_of


async def respond(request: Request, body: MessagesRequest) -> Response:
    _, info = await server_of(request).ready(request, body.model)
    with anthropics_length_errors():
        answers = await start(request, lambda: translate(body, info.tokenizer), "msg")
    return await reply(answers, MessageRenderer(answers, body.omits_thinking), bool(body.stream))


async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    _, info = await server_of(request).ready(request, body.model)
    with anthropics_length_errors():
        num_tokens = await prompt.count_tokens(request, lambda: translate(body, info.tokenizer))
    return JSONResponse({"input_tokens": num_tokens})


@contextlib.contextmanager
def anthropics_length_errors() -> Iterator[None]:
    """Refuses a prompt that is too long with the exact message of Anthropic's service. Clients parse the numbers in it,
    and try again with a shorter conversation."""
    try:
        yield
    except ContextLengthError as error:
        prompt, most = error.cause.num_prompt_tokens, error.cause.limit
        raise ApiError(400, f"prompt is too long: {prompt} tokens > {most} maximum", param="messages") from None
