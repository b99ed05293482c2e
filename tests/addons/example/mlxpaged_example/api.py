"""POST /example/generate continues a text, streamed or not. POST /example/size counts the bytes of any body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.endpoint import Api, generates, post
from mlxpaged.api.error_format import ErrorFormat
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.answers import Answer, Answers, Renderer, reply
from mlxpaged.api.generation.deltas import Update
from mlxpaged.api.generation.request import GenerationRequest, sampling_params
from mlxpaged.api.generation.submission import start
from mlxpaged.api.schema import Body, Limit
from mlxpaged.api.streaming import event
from mlxpaged.core.engine.prompt_progress import PromptProgress


class ExampleRequest(Body):
    text: str
    model: str | None = None
    max_tokens: Limit = 16
    stream: bool = False


class ExampleError(BaseModel):
    problem: str
    field: str | None


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return {"problem": error.message, "field": error.param}


async def generate(request: Request, body: ExampleRequest) -> Response:
    answers = await start(request, lambda: translate(body), "example")
    return await reply(answers, ExampleRenderer(answers), body.stream)


def translate(body: ExampleRequest) -> GenerationRequest:
    return GenerationRequest.of(body, prompt=[body.text], params=sampling_params(body))


class ExampleRenderer(Renderer):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {"text": "".join(part.text for part in answers[0].parts), **self._end()}

    def events(self, update: Update) -> Iterator[str]:
        yield event({"text": "".join(delta.text for delta in update.deltas)})

    def end(self) -> Iterator[str]:
        yield event(self._end())

    def progress(self, progress: PromptProgress) -> str:
        return event({"waiting": progress.prompt - progress.computed})

    def error(self, error: ApiError) -> str:
        return event(error_body(error, ""))

    def _end(self) -> dict[str, Any]:
        return {"tokens": self._answers.usage.completion}


async def size(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


API = Api(
    (
        generates("/example/generate", generate, "Continue a text", ExampleRequest),
        post("/example/size", size, "Count the bytes of a body"),
    ),
    ErrorFormat("/example", id_header="X-Example-Id", body=error_body, model=ExampleError),
)
