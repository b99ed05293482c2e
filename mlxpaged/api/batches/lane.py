"""The lane: runs the requests of batches, one batch after the other, in room that nobody else wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.batches.lines import LinePlace, check_lines, read_line
from mlxpaged.api.batches.records import (
    BatchRecord,
    LineErrors,
    LineFailure,
    LineResponse,
    OutputLine,
    RequestCounts,
)
from mlxpaged.api.batches.store import Store
from mlxpaged.api.body import validate
from mlxpaged.api.errors import ApiError, bad_parameter, from_engine
from mlxpaged.api.openai import chat, completions
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.request_id import new_id
from mlxpaged.engine import AsyncEngine, EngineState, EngineUnavailableError, QueueFullError

logger = logging.getLogger(__name__)

Respond = Callable[[Request, Any], Awaitable[Response]]

LineBody = ChatRequest | CompletionRequest | ResponseRequest
ENDPOINTS: dict[str, tuple[type[LineBody], Respond]] = {
    "/v1/chat/completions": (ChatRequest, chat.respond),
    "/v1/completions": (CompletionRequest, completions.respond),
    "/v1/responses": (ResponseRequest, responses.respond),
}

POLL_SECONDS = 0.1
"""How soon a batch notices that there is room, that it is cancelled or late, or that the server shuts down."""


class LaneStoppedError(Exception):
    """The engine takes no requests any more. What is not done is left to the next start of the server."""


class BatchLane:
    """Belongs to the event loop. Each request runs at LOW priority, through the same code as one over HTTP."""

    def __init__(self, app: Starlette, engine: AsyncEngine, store: Store) -> None:
        self._app = app
        self._engine = engine
        self._store = store
        self._wake = asyncio.Event()
        self._in_flight = 0  # sequences
        self._current: BatchRecord | None = None
        self._task = asyncio.ensure_future(self._run())

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    async def cancel(self, batch: BatchRecord) -> None:
        """What runs of it ends at once; what is done can be read. Does nothing to a batch that is about to end."""
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", now()
            await asyncio.to_thread(self._store.save_batch, batch)
            if batch is not self._current:
                await self._finalize(batch)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        with contextlib.suppress(EngineUnavailableError, LaneStoppedError):
            await self._engine.wait_loaded()
            while True:
                batch = next((each for each in self._store.batches.values() if each.unfinished), None)
                self._current = batch
                if batch is None:
                    await self._wake.wait()
                    self._wake.clear()
                    continue
                try:
                    await self._run_batch(batch)
                except (OSError, ValueError):  # a full disk, or a file that somebody changed
                    logger.exception("%s failed", batch.id)
                    batch.status, batch.failed_at = "failed", now()
                    await asyncio.to_thread(self._store.save_batch, batch)

    async def _run_batch(self, batch: BatchRecord) -> None:
        """From wherever it is to its end. Raises LaneStoppedError."""
        if batch.status != "finalizing":
            path = self._store.content(batch.input_file_id)
            places, errors = await asyncio.to_thread(check_lines, path, batch.endpoint)
            if errors:
                batch.status, batch.failed_at, batch.errors = "failed", now(), LineErrors(data=errors)
                await asyncio.to_thread(self._store.save_batch, batch)
                return
            succeeded = await asyncio.to_thread(self._store.done, batch.id, "output")
            failed = await asyncio.to_thread(self._store.done, batch.id, "errors")
            batch.request_counts = RequestCounts(total=len(places), completed=len(succeeded), failed=len(failed))
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", now()
            await asyncio.to_thread(self._store.save_batch, batch)
            open_places = [place for place in places if place.custom_id not in succeeded | failed]
            logger.info("%s: %d of %d requests are to be run", batch.id, len(open_places), len(places))
            await self._run_lines(batch, open_places)
        await self._finalize(batch)

    async def _run_lines(self, batch: BatchRecord, places: list[LinePlace]) -> None:
        """Until all are done, or the batch is cancelled or late."""
        tasks: dict[asyncio.Task[None], LinePlace] = {}
        waiting = places[::-1]
        left: set[LinePlace] = set(places)
        request: tuple[LinePlace, LineBody] | None = None
        try:
            while left and not self._over(batch):
                if request is None and waiting:
                    place = waiting.pop()
                    try:
                        request = place, await self._parse(batch, place)
                    except ApiError as error:
                        self._record(batch, place, new_id("req"), error.status, error.body())
                        left.discard(place)
                        continue
                if request is not None and self._has_room(sequences(request[1])):
                    self._in_flight += sequences(request[1])
                    tasks[asyncio.ensure_future(self._answer(batch, *request))] = request[0]
                    request = None
                    await asyncio.sleep(0)  # it takes its place before the next one asks whether there is room
                    continue
                if not tasks:
                    await pause()
                    continue
                done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    left.discard(tasks.pop(task))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if left and batch.expired_at is not None:
            failure = LineFailure(code="batch_expired", message="the completion window closed before its answer")
            for place in left - {tasks[task] for task in tasks if not task.cancelled() and task.exception() is None}:
                self._append(batch, OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, error=failure))

    def _over(self, batch: BatchRecord) -> bool:
        """Raises LaneStoppedError."""
        if self._engine.state is not EngineState.READY:
            raise LaneStoppedError
        if batch.status != "cancelling" and batch.expired_at is None and now() >= batch.expires_at:
            batch.expired_at = now()
        return batch.status == "cancelling" or batch.expired_at is not None

    def _has_room(self, count: int) -> bool:
        """For so many sequences, without anybody waiting for them, and with half of the places left to others.

        A request for more runs alone."""
        limit, unfinished = self._engine.config.max_num_seqs, self._engine.num_unfinished
        alone = unfinished == self._in_flight == 0
        return alone or (self._in_flight + count <= limit // 2 and unfinished + count <= limit)

    async def _parse(self, batch: BatchRecord, place: LinePlace) -> LineBody:
        """The request of a line, with the terms of a batch. Raises ApiError."""
        path, (model, _) = self._store.content(batch.input_file_id), ENDPOINTS[batch.endpoint]
        body = await asyncio.to_thread(lambda: validate(read_line(path, place).body, model))
        if body.stream:
            raise bad_parameter("stream", "must be false in a batch")
        if body.service_tier == "priority":
            raise bad_parameter("service_tier", "is 'flex' in a batch")
        limit = self._engine.config.max_num_seqs
        if sequences(body) > limit:
            raise bad_parameter(body.multiplier or "prompt", f"a request of a batch may ask for {limit} answers")
        window = float(max(1, batch.expires_at - now()))  # instead of the limits for clients that wait
        terms: dict[str, Any] = {
            "service_tier": "flex",
            "timeout": body.timeout or window,
            "ttft_timeout": body.ttft_timeout or window,
        }
        if isinstance(body, ResponseRequest):  # a batch must not push everybody's responses out of the store
            terms["store"] = bool(body.store)
        return body.model_copy(update=terms)

    async def _answer(self, batch: BatchRecord, place: LinePlace, body: LineBody) -> None:
        """Run one request and write down what came of it. Raises LaneStoppedError where that must be done again."""
        scope = {"type": "http", "method": "POST", "path": batch.endpoint, "headers": [], "query_string": b""}
        keys = self._app.state.server.keys
        caller = keys.named(batch.owner) if keys is not None and batch.owner is not None else None
        if keys is not None and batch.owner is not None and caller is None:
            # Run all the same, it would be nobody's, under no limit. What ran before the key was removed stays.
            self._in_flight -= sequences(body)
            message = f"the API key {batch.owner!r} was removed before this request was run"
            failure = LineFailure(code="api_key_removed", message=message)
            self._append(batch, OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, error=failure))
            return
        state = {"request_id": new_id("req"), "caller": caller, "body_size": place.size}
        request = Request(scope | {"app": self._app, "state": state})
        _, respond = ENDPOINTS[batch.endpoint]
        try:
            while True:
                try:
                    response = await respond(request, body)
                    status, content = response.status_code, json.loads(bytes(response.body))
                    break
                except QueueFullError:  # somebody was quicker
                    await pause()
                except EngineUnavailableError:
                    raise LaneStoppedError from None
                except Exception as error:
                    answer = from_engine(error)
                    status, content = answer.status, answer.body()
                    break
        finally:
            self._in_flight -= sequences(body)
        self._record(batch, place, request.state.request_id, status, content)

    def _record(
        self, batch: BatchRecord, place: LinePlace, request_id: str, status: int, content: dict[str, Any]
    ) -> None:
        response = LineResponse(status_code=status, request_id=request_id, body=content)
        self._append(batch, OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, response=response))

    def _append(self, batch: BatchRecord, line: OutputLine) -> None:
        self._store.append(batch.id, line)
        if line.response is not None and line.response.status_code == 200:
            batch.request_counts.completed += 1
        else:
            batch.request_counts.failed += 1

    async def _finalize(self, batch: BatchRecord) -> None:
        """Publish the lines that are done. Can be repeated by the next start of the server."""
        output_id, error_id = f"file-{batch.id}-output", f"file-{batch.id}-errors"
        if batch.status not in ("cancelling", "finalizing"):
            batch.status, batch.finalizing_at = "finalizing", now()
            await asyncio.to_thread(self._store.save_batch, batch)

        def publish() -> None:
            batch.output_file_id = output_id if self._store.publish_results(batch, "output", output_id, now()) else None
            batch.error_file_id = error_id if self._store.publish_results(batch, "errors", error_id, now()) else None
            if batch.cancelling_at is not None:
                batch.status, batch.cancelled_at = "cancelled", now()
            elif batch.expired_at is not None:
                batch.status = "expired"
            else:
                batch.status, batch.completed_at = "completed", now()
            self._store.save_batch(batch)

        await asyncio.to_thread(publish)
        logger.info("%s is %s: %s", batch.id, batch.status, batch.request_counts)


def sequences(body: LineBody) -> int:
    """How many a request takes in the engine."""
    return body.num_candidates * (len(body.prompts()) if isinstance(body, CompletionRequest) else 1)


def now() -> int:
    """Seconds since 1970: batches outlive the clock of a process."""
    return int(time.time())


async def pause() -> None:
    await asyncio.sleep(POLL_SECONDS)
