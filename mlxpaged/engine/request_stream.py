"""The outputs of one request. Its handler on the event loop reads them here."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from mlxpaged.core.engine import errors
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.prompt_progress import Place, PromptChunk, PromptProgress, WaitingLine
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.scheduling.sequence import FinishReason

AT_ONCE_SECONDS = 0.001
"""Outputs that come within this time are of one step."""

SEEN_SECONDS = 0.05
"""Steps that are shorter are 20 a second: a reader does not see that some bring several tokens."""

MOST_STEP_SECONDS = 1.0
"""The request itself has waited if its outputs come later than this one after another."""


class RequestStream:
    """An iterator over the outputs. A reader that stops before the last output must close it."""

    def __init__(
        self,
        request: Request,
        abort: Callable[[str], None],
        state: Callable[[], EngineState],
        line: WaitingLine,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self._state = state
        self._line = line
        self._clock = clock
        self._place: Place | None = line.enter(request)  # None after the first step that computes a part of it
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._news = asyncio.Event()
        self._news_at = -math.inf  # when the outputs of the latest step came
        self._step_seconds = 0.0  # how long after those of the step before
        self._latest = RequestOutput(request.request_id, request.arrival_time)
        self._computed_tokens = 0
        self._abort = abort
        self._finished = False
        self.ended_in: EngineState | None = None  # if it ended in a state that may be over when the end is read

    def put(self, output: RequestOutput) -> None:
        if self._place is not None:
            self._leave_line(self._place)
        self._latest = output
        self._outputs.put_nowait(output)
        now = self._clock()
        if not 0 <= (passed := now - self._news_at) < AT_ONCE_SECONDS:
            self._news_at, self._step_seconds = now, max(0.0, passed)
        self._news.set()

    def put_chunk(self, chunk: PromptChunk) -> None:
        """Note how far the prompt is. Readers do not see it, unless they are woken."""
        if self._place is not None:
            self._leave_line(self._place)
        self._latest = self._latest._replace(num_cached_tokens=chunk.cached_tokens)
        self._computed_tokens = chunk.computed_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether no step has computed a part of it."""
        return self._place is not None

    def wake(self) -> None:
        """Give the reader an output without news, unless it has the last one."""
        if self._latest.finish_reason is None:
            self._outputs.put_nowait(self._latest._replace(text="", token_ids=(), logprobs=(), prompt_logprobs=None))

    @property
    def progress(self) -> PromptProgress:
        prompt, latest = len(self.request.prompt_token_ids), self._latest
        return PromptProgress(
            waiting_before=None if self._place is None else self._line.before(self._place),
            prompt=prompt,
            cached=latest.num_cached_tokens,
            computed=prompt if latest.num_output_tokens else self._computed_tokens,
            output=latest.num_output_tokens,
            seconds=self._clock() - self.request.arrival_time,
        )

    def _leave_line(self, place: Place) -> None:
        self._line.leave(place)
        self._place = None

    def close(self) -> None:
        """Abort the request, unless its last output was read."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        """Raises the errors of `raise_unless_complete`."""
        while not self._finished:
            output = await self._outputs.get()
            if output.finish_reason is not None:
                self._finished = True
            raise_unless_complete(output.finish_reason, output.error, self.ended_in or self._state())
            yield output

    async def evenly(self) -> AsyncGenerator[RequestOutput, None]:
        """The same, but the outputs of a step with accepted drafts come one after another, spread over the time of a
        step. After the next step's have come, the rest comes faster, and after the last one all come at once."""
        async with aclosing(self.__aiter__()) as outputs:
            async for output in outputs:
                yield output
                if (waiting := self._outputs.qsize()) and self._latest.finish_reason is None:
                    left = self._news_at + self._step_seconds - self._clock()
                    await self._pause(max(0.0, left) / (waiting + 1))

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the next outputs come."""
        if SEEN_SECONDS <= self._step_seconds <= MOST_STEP_SECONDS:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)


def raise_unless_complete(reason: FinishReason | None, error: str | None, state: EngineState) -> None:
    """Raises DeadlineExceededError, RequestCancelledError, ConstraintFailedError, OutOfMemoryError or
    RequestFailedError if a request ended without its answer. If it ended because the engine shuts down, is dead or is
    stalled, raises EngineUnavailableError."""
    if reason is FinishReason.TIMEOUT:
        raise errors.DeadlineExceededError(error)
    if reason is FinishReason.CANCELLED:
        raise errors.RequestCancelledError(error)
    if reason is FinishReason.CONSTRAINT:
        raise errors.ConstraintFailedError(error)
    if reason is FinishReason.MEMORY:
        raise errors.OutOfMemoryError(error)
    if reason in (FinishReason.ERROR, FinishReason.ABORT):
        if state in (EngineState.DRAINING, EngineState.DEAD, EngineState.STALLED):
            raise errors.EngineUnavailableError(state, error or "the client disconnected")
        raise errors.RequestFailedError(error or "the client disconnected")
