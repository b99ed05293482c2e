"""The batch runner: runs the requests of batches, one batch after the other, while the engine has spare capacity."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.batches.lines import LinePlace, check_lines, read_line
from mlxpaged.api.batches.records import BatchRecord, LineError, LineErrors, OutputLine, RequestCounts
from mlxpaged.api.batches.store import Store
from mlxpaged.api.body import validate
from mlxpaged.api.errors import NO_ROOM, OUT_OF_MEMORY, RETRY, ApiError, bad_parameter, from_engine
from mlxpaged.api.openai import chat, completions
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.reading import Reading
from mlxpaged.api.request_id import new_id
from mlxpaged.engine import EngineState, EngineUnavailableError, QueueFullError
from mlxpaged.registry import Registry

logger = logging.getLogger(__name__)

Respond = Callable[[Request, Any], Awaitable[Response]]
Result = TypeVar("Result")

LineBody = ChatRequest | CompletionRequest | ResponseRequest
BATCH_ENDPOINTS: dict[str, tuple[type[LineBody], Respond]] = {
    "/v1/chat/completions": (ChatRequest, chat.respond),
    "/v1/completions": (CompletionRequest, completions.respond),
    "/v1/responses": (ResponseRequest, responses.respond),
}

CLIENT = "batches"
"""The client of a batch's requests in the log, if the batch has no owner."""

POLL_SECONDS = 0.1
"""A batch checks at this interval whether there is room, and whether the batch or the server has to stop."""

NO_ROOM_SECONDS = 2.0
"""A request whose model does not fit beside models that run others tries again after this time."""


class BatchRunner:
    """Runs batches on the event loop. Each request has LOW priority and takes the same code path as one over HTTP.

    The runner ends when the engine takes no more requests. The next start of the server runs what is left.
    """

    def __init__(self, app: Starlette, registry: Registry, store: Store) -> None:
        self._app = app
        self._registry = registry
        self._store = store
        self.wake = asyncio.Event()  # set when there is a new batch
        self._in_flight = 0  # sequences
        self._current: BatchRecord | None = None
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="mlxpaged-batches")
        self._task = asyncio.ensure_future(self._run())

    async def cancel(self, batch: BatchRecord) -> None:
        """End the batch's running requests at once; finished lines stay readable. No effect while it is finalized."""
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", now()
            await self._on_disk(lambda: self._store.save_batch(batch))
            if batch is not self._current:
                await self._finalize(batch)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._disk_thread.shutdown)

    async def _on_disk(self, function: Callable[[], Result]) -> Result:
        """Run a function that may block on the disk. One thread runs them all, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._disk_thread, function)

    async def _run(self) -> None:
        with contextlib.suppress(EngineUnavailableError):
            await self._registry.wait_loaded()
            while True:
                batch = next((each for each in list(self._store.batches.values()) if each.unfinished), None)
                self._current = batch
                if batch is None:
                    await self.wake.wait()
                    self.wake.clear()
                    continue
                try:
                    await self._run_batch(batch)
                except EngineUnavailableError:
                    raise
                except Exception as error:  # a full disk, a changed file, a bug: the next batch still runs
                    logger.exception("%s failed", batch.id)
                    reason = error.strerror if isinstance(error, OSError) else None  # its text would name our paths
                    message = reason or f"{type(error).__name__}: {error}"
                    try:
                        await self._fail(batch, [LineError(code="batch_failed", message=message)])
                    except Exception:
                        logger.exception("%s: the failure was not saved; a restart runs the batch again", batch.id)

    async def _fail(self, batch: BatchRecord, errors: list[LineError]) -> None:
        batch.status, batch.failed_at, batch.errors = "failed", now(), LineErrors(data=errors)
        await self._on_disk(lambda: self._store.save_batch(batch))

    async def _run_batch(self, batch: BatchRecord) -> None:
        """Run the batch from its current state to its end. Raises EngineUnavailableError."""
        if batch.status != "finalizing":
            path = self._store.content(batch.input_file_id)
            places, errors = await self._on_disk(lambda: check_lines(path, batch.endpoint))
            if errors:
                await self._fail(batch, errors)
                return
            succeeded = await self._on_disk(lambda: self._store.done(batch.id, "output"))
            failed = await self._on_disk(lambda: self._store.done(batch.id, "errors"))
            batch.request_counts = RequestCounts(total=len(places), completed=len(succeeded), failed=len(failed))
            if batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", now()
            await self._on_disk(lambda: self._store.save_batch(batch))
            left = [place for place in places if place.custom_id not in succeeded | failed]
            logger.info("%s: %d of %d requests are left to run", batch.id, len(left), len(places))
            await self._run_lines(batch, left)
        await self._finalize(batch)

    async def _run_lines(self, batch: BatchRecord, places: list[LinePlace]) -> None:
        """Run requests until all are done, or the batch is cancelled or expires."""
        left = dict.fromkeys(places)  # requests without an output line
        waiting = places[::-1]
        tasks: dict[asyncio.Task[OutputLine], LinePlace] = {}
        request: tuple[LinePlace, LineBody] | None = None

        async def append(place: LinePlace, line: OutputLine) -> None:
            await self._on_disk(lambda: self._store.append(batch.id, line))
            batch.request_counts.completed += line.succeeded
            batch.request_counts.failed += not line.succeeded
            del left[place]

        try:
            while left and not self._is_over(batch):
                if request is None and waiting:
                    place = waiting.pop()
                    try:
                        request = place, await self._parse(batch, place)
                    except ApiError as error:
                        await append(place, response_line(place, new_id("req"), error.status, error.body()))
                        continue
                if request is not None and self._has_room(num_sequences(request[1])):
                    self._in_flight += num_sequences(request[1])
                    tasks[asyncio.ensure_future(self._answer(batch, *request))] = request[0]
                    request = None
                    await asyncio.sleep(0)  # it is submitted before the next request asks whether there is room
                    continue
                if not tasks:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await append(tasks.pop(task), task.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task, place in tasks.items():  # requests that ended together with the batch
            if not task.cancelled() and task.exception() is None:
                await append(place, task.result())
        if batch.expired_at is not None:
            for place in list(left):
                message = "the completion window closed before this request was answered"
                await append(place, failure_line(place, "batch_expired", message))

    def _is_over(self, batch: BatchRecord) -> bool:
        """Whether the batch was cancelled or has expired. Raises EngineUnavailableError. A stall may end."""
        try:
            self._registry.require_ready()
        except EngineUnavailableError as error:
            if error.state is not EngineState.STALLED:
                raise
        if batch.status != "cancelling" and batch.expired_at is None and now() >= batch.expires_at:
            batch.expired_at = now()
        return batch.status == "cancelling" or batch.expired_at is not None

    def _has_room(self, count: int) -> bool:
        """Whether `count` sequences may start: batches use at most half of the slots, unless nothing else runs."""
        limit, unfinished = self._registry.base.max_num_seqs, self._registry.num_unfinished
        alone = unfinished == self._in_flight == 0
        return alone or (self._in_flight + count <= limit // 2 and unfinished + count <= limit)

    async def _parse(self, batch: BatchRecord, place: LinePlace) -> LineBody:
        """Returns the request of a line, with a batch's priority and timeouts. Raises ApiError."""
        path, (model, _) = self._store.content(batch.input_file_id), BATCH_ENDPOINTS[batch.endpoint]
        server = self._app.state.server
        reading = Reading(model, server.http.strict)
        body = await self._on_disk(lambda: validate(read_line(path, place).body, model, reading))
        server.ignored_fields.note(batch.owner or CLIENT, reading.ignored)
        if body.stream:
            raise bad_parameter("stream", "must be false in a batch")
        if body.service_tier == "priority":
            raise bad_parameter("service_tier", "must not be 'priority' in a batch; its requests run as 'flex'")
        limit = self._registry.base.max_num_seqs
        if (count := num_sequences(body)) > limit:
            message = f"asks for {count} answers; the limit of a batch's request is {limit} (--max-num-seqs)"
            raise bad_parameter(body.multiplier or "prompt", message)
        window = float(max(1, batch.expires_at - now()))  # instead of the default timeouts of interactive requests
        update: dict[str, Any] = {
            "service_tier": "flex",
            "timeout": body.timeout or window,
            "ttft_timeout": body.ttft_timeout or window,
        }
        if isinstance(body, ResponseRequest):  # by default a batch stores nothing: it would evict other responses
            update["store"] = bool(body.store)
        return body.model_copy(update=update)

    async def _answer(self, batch: BatchRecord, place: LinePlace, body: LineBody) -> OutputLine:
        """Run one request. Raises EngineUnavailableError if it has to run again after a restart."""
        try:
            keys = self._app.state.server.keys
            caller = keys.named(batch.owner) if keys is not None and batch.owner is not None else None
            if keys is not None and batch.owner is not None and caller is None:  # it would run without limits
                message = f"the API key {batch.owner!r} was removed before this request was run"
                return failure_line(place, "api_key_removed", message)
            headers = [(b"user-agent", CLIENT.encode())]
            scope = {"type": "http", "method": "POST", "path": batch.endpoint, "headers": headers, "query_string": b""}
            state: dict[str, Any] = {"request_id": new_id("req"), "caller": caller, "body_size": place.size}
            state["ignored"] = []
            request = Request(scope | {"app": self._app, "state": state})
            _, respond = BATCH_ENDPOINTS[batch.endpoint]
            while True:
                try:
                    response = await respond(request, body)
                    status, content = response.status_code, json.loads(bytes(response.body))
                except QueueFullError:  # another request took the room
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                except Exception as error:
                    if isinstance(error, EngineUnavailableError):
                        if error.state is EngineState.STALLED:
                            await asyncio.sleep(POLL_SECONDS)
                            continue
                        self._registry.require_ready()  # raises if it is the whole server, and not the line's model
                    answer = from_engine(error)
                    if answer.code in (NO_ROOM, OUT_OF_MEMORY) and answer.headers == RETRY:
                        await asyncio.sleep(NO_ROOM_SECONDS)
                        continue
                    status, content = answer.status, answer.body()
                return response_line(place, request.state.request_id, status, content)
        finally:
            self._in_flight -= num_sequences(body)

    async def _finalize(self, batch: BatchRecord) -> None:
        """Publish the finished lines. The next start of the server can repeat this."""
        if batch.status not in ("cancelling", "finalizing"):
            batch.status, batch.finalizing_at = "finalizing", now()
            await self._on_disk(lambda: self._store.save_batch(batch))

        def publish() -> None:
            batch.output_file_id = self._store.publish_results(batch, "output", now())
            batch.error_file_id = self._store.publish_results(batch, "errors", now())
            if batch.cancelling_at is not None:
                batch.status, batch.cancelled_at = "cancelled", now()
            elif batch.expired_at is not None:
                batch.status = "expired"
            else:
                batch.status, batch.completed_at = "completed", now()
            self._store.save_batch(batch)

        await self._on_disk(publish)
        logger.info("%s is %s: %s", batch.id, batch.status, batch.request_counts)


def response_line(place: LinePlace, request_id: str, status: int, content: dict[str, Any]) -> OutputLine:
    response = {"status_code": status, "request_id": request_id, "body": content}
    return OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, response=response)


def failure_line(place: LinePlace, code: str, message: str) -> OutputLine:
    error = {"code": code, "message": message}
    return OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, error=error)


def num_sequences(body: LineBody) -> int:
    """How many sequences a request takes in the engine."""
    return body.num_candidates * (len(body.prompt) if isinstance(body, CompletionRequest) else 1)


def now() -> int:
    """Returns seconds since 1970: batches outlive the monotonic clock of a process."""
    return int(time.time())
