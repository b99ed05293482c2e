"""Finds requests in flight by id, so that they can be cancelled and their tokens counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxpaged.api.access.caller import Caller
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.errors import DuplicateRequestError, RequestCancelledError

Result = TypeVar("Result")


@dataclass
class OpenRequest:
    request_id: str
    names: tuple[str, ...]  # engine ids of its sequences
    caller: Caller | None
    engine: AsyncEngine | None = None  # None while it waits for its model
    load: asyncio.Future[Any] | None = None  # which it waits for
    submitted: bool = False  # to the engine, after its prompt is tokenized
    cancelled: bool = False  # if it is not submitted yet, it never will be

    def cancel(self) -> None:
        self.cancelled = True
        if self.load is not None:
            self.load.cancel()

    def count(self, tokens: int) -> None:
        """Count tokens against the limit of the request's key."""
        if self.caller is not None:
            self.caller.allowance.take("tokens", tokens)

    @property
    def owner(self) -> str | None:
        return None if self.caller is None else self.caller.name


class OpenRequests:
    def __init__(self) -> None:
        self._by_name: dict[str, OpenRequest] = {}
        self._waiting: list[OpenRequest] = []

    def open(self, request_id: str, count: int, caller: Caller | None, engine: AsyncEngine) -> OpenRequest:
        """Registers a request for `count` sequences. One is named `request_id`, several request_id-0 and so on.

        Raises DuplicateRequestError if another request has one of these names.
        """
        names = (request_id,) if count == 1 else tuple(f"{request_id}-{index}" for index in range(count))
        request = OpenRequest(request_id, names, caller, engine)
        for name in {request_id, *names}:
            if name in self._by_name:
                raise DuplicateRequestError(f"an unfinished request already has the id {name}")
        self._by_name.update(dict.fromkeys((request_id, *names), request))
        return request

    async def wait_for(self, load: Awaitable[Result], request_id: str, caller: Caller | None) -> Result:
        """Returns what the load of a model returns. The request that waits for it can be cancelled meanwhile; others
        may have its id. Raises RequestCancelledError."""
        task = asyncio.ensure_future(load)
        request = OpenRequest(request_id, (), caller, load=task)
        self._waiting.append(request)
        try:
            await asyncio.wait([task])
        finally:
            self._waiting.remove(request)
            task.cancel()
        if request.cancelled:
            raise RequestCancelledError("the request was cancelled")
        return task.result()

    def close(self, request: OpenRequest) -> None:
        """Closing a request twice is harmless."""
        for name in (request.request_id, *request.names):
            if self._by_name.get(name) is request:
                del self._by_name[name]

    def get(self, name: str) -> OpenRequest | None:
        """Returns the request with this id, or with a sequence of this name. It does not wait for its model."""
        return self._by_name.get(name)

    def named(self, name: str) -> list[OpenRequest]:
        """Returns the request that `get` returns, and those with this id that wait for their models."""
        found = self.get(name)
        return [*([] if found is None else [found]), *(each for each in self._waiting if each.request_id == name)]

    def held_beside(self, request: OpenRequest) -> int:
        """Returns how many sequences the owner of a request has in the queue of its engine, without this request."""
        others = (each for each in self if each is not request and each.engine is request.engine)
        return sum(len(each.names) for each in others if each.owner == request.owner)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter({id(request): request for request in (*self._by_name.values(), *self._waiting)}.values())
