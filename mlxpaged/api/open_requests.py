"""The requests for text that are being answered, by their ids, so that they can be cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxpaged.api.access.caller import Caller
from mlxpaged.engine import DuplicateRequestError


@dataclass
class OpenRequest:
    """request_id: that of the response. names: one for every sequence that the engine runs for it. caller: whose it
    is. submitted: whether the engine has them, which comes after the prompt is tokenized; where it is cancelled before,
    it never does."""

    request_id: str
    names: tuple[str, ...]
    caller: Caller | None
    submitted: bool = False
    cancelled: bool = False

    def count(self, tokens: int) -> None:
        """Against the limit of its key."""
        if self.caller is not None:
            self.caller.allowance.take("tokens", tokens)

    def is_open_to(self, caller: Caller | None) -> bool:
        """Whether that caller may end it: its own, by the key's name, and an admin everybody's."""
        return caller is None or caller.admin or (self.caller is not None and self.caller.name == caller.name)


class OpenRequests:
    def __init__(self) -> None:
        self._by_name: dict[str, OpenRequest] = {}

    def open(self, request_id: str, count: int, caller: Caller | None) -> OpenRequest:
        """A request for `count` sequences: `request_id` itself for one, else request_id-0, request_id-1 and so on.

        Raises DuplicateRequestError where one of these names is another request's.
        """
        names = (request_id,) if count == 1 else tuple(f"{request_id}-{index}" for index in range(count))
        request = OpenRequest(request_id, names, caller)
        for name in {request_id, *names}:
            if name in self._by_name:
                raise DuplicateRequestError(f"a request with the id {name} is unfinished")
        self._by_name.update(dict.fromkeys((request_id, *names), request))
        return request

    def close(self, request: OpenRequest) -> None:
        """Closing twice is no error."""
        for name in (request.request_id, *request.names):
            if self._by_name.get(name) is request:
                del self._by_name[name]

    def get(self, name: str) -> OpenRequest | None:
        """By its id, or by the name of one of its sequences."""
        return self._by_name.get(name)

    def count(self, name: str, tokens: int) -> None:
        """Tokens that the sequence of this name has generated."""
        request = self._by_name.get(name)
        if request is not None:
            request.count(tokens)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter({id(request): request for request in self._by_name.values()}.values())
