"""The requests of a batch: each line is read, and sent through the same code path as a request over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.batches.lines import LinePlace, read_line
from mlxpaged.api.batches.records import BatchRecord, OutputLine
from mlxpaged.api.batches.store import Store
from mlxpaged.api.body import validate
from mlxpaged.api.decisions import routes as decisions
from mlxpaged.api.decisions.routes import DecisionRequest
from mlxpaged.api.errors import NO_ROOM, OUT_OF_MEMORY, RETRY, bad_parameter, from_engine
from mlxpaged.api.openai import chat, completions
from mlxpaged.api.openai.responses import routes as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from mlxpaged.api.reading import Reading
from mlxpaged.api.request_id import new_id
from mlxpaged.api.turns import TurnRefusedError
from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError, QueueFullError
from mlxpaged.registry.registry import Registry

Respond = Callable[[Request, Any], Awaitable[Response]]

LineBody = ChatRequest | CompletionRequest | ResponseRequest | DecisionRequest
BATCH_ENDPOINTS: dict[str, tuple[type[LineBody], Respond]] = {
    "/v1/chat/completions": (ChatRequest, chat.respond),
    "/v1/completions": (CompletionRequest, completions.respond),
    "/v1/responses": (ResponseRequest, responses.respond),
    "/v1/decisions": (DecisionRequest, decisions.decisions),
}

CLIENT = "batches"
"""The client of a batch's requests in the log, if the batch has no owner."""

RETRY_SECONDS = 0.1
"""A request that another one left no room for, or whose model is not ready, tries again after this time."""

PASSING_STATES = (EngineState.STALLED, EngineState.LOADING)
"""A line waits while its model is in one of these: its ranks start again, or the load of the model was ended and begins
anew. A line of the default model waits too while that is dead, which only another load or a restart of the server
ends."""

NO_ROOM_SECONDS = 2.0
"""A request whose model does not fit beside models that run others tries again after this time."""


class LineRequests:
    """Reads and answers the lines of batches. Each request has LOW priority."""

    def __init__(self, app: Starlette, registry: Registry, store: Store) -> None:
        self._app = app
        self._registry = registry
        self._store = store

    def require_server(self) -> None:
        """Raises EngineUnavailableError if the server ends. A stall may end, ranks start again, and a model that failed
        may be loaded again."""
        try:
            self._registry.require_ready()
        except EngineUnavailableError as error:
            if error.state is EngineState.DRAINING:
                raise

    def read(self, batch: BatchRecord, place: LinePlace) -> tuple[LineBody, list[str]]:
        """Returns the request of a line, and its fields that are ignored. It blocks on the disk. Raises ApiError."""
        path, (model, _) = self._store.content(batch.input_file_id), BATCH_ENDPOINTS[batch.endpoint]
        reading = Reading(model, self._app.state.server.http.strict)
        return validate(read_line(path, place).body, model, reading), reading.ignored

    def accepted(self, batch: BatchRecord, body: LineBody, ignored: Sequence[str]) -> LineBody:
        """Returns the request with a batch's priority and timeouts. Raises ApiError."""
        self._app.state.server.ignored_fields.note(client_of(batch), ignored)
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

    async def answer(self, batch: BatchRecord, place: LinePlace, body: LineBody) -> OutputLine:
        """Run one request. Raises EngineUnavailableError if it has to run again after a restart."""
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
        content: Mapping[str, Any] | bytes | memoryview
        while True:
            request.state.body_size = place.size  # responding adds what a stored conversation has
            try:
                response = await respond(request, body)
                status, content = response.status_code, response.body
            except (QueueFullError, TurnRefusedError):  # another request took the room, or the turn
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except Exception as error:
                if isinstance(error, EngineUnavailableError):
                    self.require_server()  # it may be the line's model alone
                    is_default = self._registry.names.served(body.model) is self._registry.default
                    if error.state in PASSING_STATES or (is_default and self._registry.state is EngineState.DEAD):
                        await asyncio.sleep(RETRY_SECONDS)
                        continue
                answer = from_engine(error)
                if answer.code in (NO_ROOM, OUT_OF_MEMORY) and answer.headers == RETRY:
                    await asyncio.sleep(NO_ROOM_SECONDS)
                    continue
                status, content = answer.status, answer.body()
            return response_line(place, request.state.request_id, status, content)


def response_line(
    place: LinePlace, request_id: str, status: int, content: Mapping[str, Any] | bytes | memoryview
) -> OutputLine:
    response = {"status_code": status, "request_id": request_id, "body": content}
    return OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, response=response)


def failure_line(place: LinePlace, code: str, message: str) -> OutputLine:
    error = {"code": code, "message": message}
    return OutputLine(id=new_id("batch_req"), custom_id=place.custom_id, error=error)


def client_of(batch: BatchRecord) -> str:
    """Who takes turns with others: the batch's key."""
    return batch.owner or CLIENT


def num_sequences(body: LineBody) -> int:
    """How many sequences a request takes in the engine."""
    return body.num_candidates * (len(body.prompt) if isinstance(body, CompletionRequest) else 1)


def now() -> int:
    """Returns seconds since 1970: batches outlive the monotonic clock of a process."""
    return int(time.time())
