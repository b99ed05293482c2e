"""Finds requests in flight by id, so that they can be cancelled and their tokens counted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlxpaged.api.access.caller import Caller
from mlxpaged.core.engine.errors import DuplicateRequestError, RequestCancelledError
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.engine.async_engine import AsyncEngine

Result = TypeVar("Result")


@dataclass
class OpenRequest:
    request_id: str
    caller: Caller | None
    shown: tuple[str, ...] = ()  # ids of its choices
    # Engine ids of its sequences: those of its choices, unless another key's request has one.
    names: tuple[str, ...] = ()
    engine: AsyncEngine | None = None  # None while it waits for its model
    load: asyncio.Future[Any] | None = None  # which it waits for
    submitted: bool = False  # to the engine, after its prompt is tokenized
    cancelled: bool = False  # if it is not submitted yet, it never will be
    goes_on: bool = False  # it submits further sequences when those that it has are done
    is_counted: bool = False
    # By engine id, until the first output: tokens of its prompt that count.
    counted_tokens: dict[str, int] = field(default_factory=dict)

    def cancel(self) -> None:
        self.cancelled = True
        if self.load is not None:
            self.load.cancel()

    def submit(self, prompt_tokens: Sequence[int]) -> None:
        """The engine has its sequences: count the request, and tokens of their prompts. prompt_tokens: of each one,
        those that count."""
        self.submitted = True
        if self.caller is not None:
            self.caller.count(requests=int(not self.is_counted), prompt=sum(prompt_tokens))
            self.counted_tokens = dict(zip(self.names, prompt_tokens, strict=True))
            self.is_counted = True

    def observe(self, request: Request, output: RequestOutput) -> None:
        """Count the tokens of an output, and at the first one those of the prompt that were cached. What counts of a
        prompt is its end."""
        if self.caller is not None:
            counted = self.counted_tokens.pop(request.request_id, 0)
            cached = max(0, output.num_cached_tokens - (len(request.prompt_token_ids) - counted)) if counted else 0
            self.caller.count(cached=cached, output=len(output.token_ids))

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the ids by which its owner knows it."""
        return tuple(dict.fromkeys((self.request_id, *self.shown)))

    @property
    def owner(self) -> str | None:
        return None if self.caller is None else self.caller.name


class OpenRequests:
    """Ids are private to a key: one key learns nothing of the ids that another one uses."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str | None, str], OpenRequest] = {}  # by owner and id, also those of the choices
        self._by_name: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        self._waiting: list[OpenRequest] = []

    def open(self, request: OpenRequest, count: int, engine: AsyncEngine) -> OpenRequest:
        """Registers a request for `count` choices, instead of those that it had, which have ended. One has the id
        `request_id`, several request_id-0 and so on.

        Raises DuplicateRequestError if another request of the caller has one of these ids.
        """
        self.close(request)
        request_id = request.request_id
        request.shown = (request_id,) if count == 1 else tuple(f"{request_id}-{index}" for index in range(count))
        request.names = tuple(self._name(each, request.caller, engine) for each in request.shown)
        request.engine, request.submitted = engine, False
        for each in request.ids:
            if (request.owner, each) in self._by_id:
                raise DuplicateRequestError(f"an unfinished request already has the id {each}")
        self._by_id.update(dict.fromkeys(((request.owner, each) for each in request.ids), request))
        self._by_name.update(dict.fromkeys(request.names, request))
        return request

    def _name(self, shown: str, caller: Caller | None, engine: AsyncEngine) -> str:
        """Returns an engine id. No id of a client has a "~"."""
        if caller is None or not (shown in self._by_name or engine.knows(shown)):
            return shown
        return f"{shown}~{next(self._numbers)}"

    async def wait_for(self, load: Awaitable[Result], request_id: str, caller: Caller | None) -> Result:
        """Returns what the load of a model returns. The request that waits for it can be cancelled meanwhile; others
        may have its id. Raises RequestCancelledError."""
        task = asyncio.ensure_future(load)
        request = OpenRequest(request_id, caller, load=task)
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
        for each in request.ids:
            if self._by_id.get((request.owner, each)) is request:
                del self._by_id[request.owner, each]
        for name in request.names:
            if self._by_name.get(name) is request:
                del self._by_name[name]

    def get(self, name: str) -> OpenRequest | None:
        """Returns the request with a sequence of this name. It does not wait for its model."""
        return self._by_name.get(name)

    def named(self, request_id: str) -> list[OpenRequest]:
        """Returns the requests of all keys with this id, or with a choice of this id or a sequence of this name. The
        status shows these names to admin keys."""
        return [each for each in self if request_id in (*each.ids, *each.names)]

    def held_beside(self, request: OpenRequest) -> int:
        """Returns how many sequences the owner of a request has in the queue of its engine, without this request."""
        others = (each for each in self if each is not request and each.engine is request.engine)
        return sum(len(each.names) for each in others if each.owner == request.owner)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter({id(request): request for request in (*self._by_id.values(), *self._waiting)}.values())
