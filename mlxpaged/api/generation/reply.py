"""The response of a request for text, whole or as events, in the words of one API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import ApiError, from_engine
from mlxpaged.api.generation.answers import Answer, Answers
from mlxpaged.api.generation.deltas import Update
from mlxpaged.api.streaming import EventStream


class Renderer(ABC):
    """What one API's answers look like. Events are texts of server-sent events."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    def begin(self) -> Iterable[str]:
        """The events before the first update."""
        return ()

    @abstractmethod
    def events(self, update: Update) -> Iterable[str]:
        """The events of an update."""

    def end(self) -> Iterable[str]:
        """The events after the last update."""
        return ()

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """The event that ends a stream that failed."""


async def reply(answers: Answers, renderer: Renderer, stream: bool) -> Response:
    if stream:
        return EventStream(events(answers, renderer), answers.close)
    return JSONResponse(renderer.whole(await answers.collect()))


async def events(answers: Answers, renderer: Renderer) -> AsyncGenerator[str, None]:
    try:
        for event in renderer.begin():
            yield event
        async with aclosing(answers.updates()) as updates:
            async for update in updates:
                for event in renderer.events(update):
                    yield event
        for event in renderer.end():
            yield event
    except Exception as error:
        yield renderer.error(from_engine(error))
