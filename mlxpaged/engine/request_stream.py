"""The outputs of one request. Its handler on the event loop reads them here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from mlxpaged.engine import errors
from mlxpaged.engine.errors import EngineState
from mlxpaged.engine.request import Request, RequestOutput
from mlxpaged.scheduler import FinishReason


class RequestStream:
    """An iterator over the outputs. A reader that stops before the last output must close it."""

    def __init__(self, request: Request, abort: Callable[[str], None], state: Callable[[], EngineState]) -> None:
        self.request = request
        self._state = state
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._abort = abort
        self._finished = False

    def put(self, output: RequestOutput) -> None:
        self._outputs.put_nowait(output)

    def close(self) -> None:
        """Abort the request, unless its last output was read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Raises the errors of `raise_unless_complete`."""
        while not self._finished:
            output = await self._outputs.get()
            if output.finish_reason is not None:
                self._finished = True
            raise_unless_complete(output.finish_reason, output.error, self._state())
            yield output


def raise_unless_complete(reason: FinishReason | None, error: str | None, state: EngineState) -> None:
    """Raises DeadlineExceededError, RequestCancelledError or RequestFailedError if a request ended without its answer.
    If it ended because the engine shuts down or is dead, raises EngineUnavailableError instead."""
    if reason is FinishReason.TIMEOUT:
        raise errors.DeadlineExceededError(error)
    if reason is FinishReason.CANCELLED:
        raise errors.RequestCancelledError(error)
    if reason in (FinishReason.ERROR, FinishReason.ABORT):
        if state in (EngineState.DRAINING, EngineState.DEAD):
            raise errors.EngineUnavailableError(state, error or "the client disconnected")
        raise errors.RequestFailedError(error or "the client disconnected")
