"""Keeps the newest responses in memory, so that clients can read and continue them.

What is kept is serialized: a `{}` of two bytes takes thirty times as much as an object. A response holds its own items
and the response that it continues, whose items it needs for as long. All that is held counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter

from mlxpaged.api.openai.responses.schema import Item, OutputItem
from mlxpaged.api.schema import OneOf

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024
"""The most bytes of all responses and their items. If there are too many, the owner who has most loses the oldest: who
has less than an equal share loses nothing."""

ITEM: TypeAdapter[Item] = TypeAdapter(Annotated[Item, OneOf("type")])
OUTPUT: TypeAdapter[list[OutputItem]] = TypeAdapter(list[OutputItem])


@dataclass(eq=False)
class StoredResponse:
    """owner: the name of its API key, if any. body: the response. previous: the one that it continues. inputs, outputs:
    the items of the request and of the answer, by their ids. All but the owner are JSON. uses: how many hold it, the
    store and the responses that continue it; its bytes count while it has any."""

    owner: str | None
    body: bytes
    previous: StoredResponse | None
    inputs: dict[str, bytes]
    outputs: dict[str, bytes]
    uses: int = field(default=0, init=False)

    @property
    def response(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(item) for items in (self.inputs, self.outputs) for item in items.values())

    @property
    def chain(self) -> list[StoredResponse]:
        """Returns this response and those before it, the newest first."""
        chain = [self]
        while (previous := chain[-1].previous) is not None:
            chain.append(previous)
        return chain

    @property
    def num_held_bytes(self) -> int:
        """Returns the bytes of this response and those before it."""
        return sum(each.num_bytes for each in self.chain)

    @property
    def conversation(self) -> list[Item]:
        """Returns all items up to the end of the answer, without the instructions."""
        return [
            ITEM.validate_json(item)
            for stored in reversed(self.chain)
            for items in (stored.inputs, stored.outputs)
            for item in items.values()
        ]

    def input_items(self) -> Iterator[tuple[str, Item]]:
        for item_id, item in self.inputs.items():
            yield item_id, ITEM.validate_json(item)


class ResponseStore:
    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self._holders: dict[str, StoredResponse] = {}  # by the ids of their items
        self._num_bytes: Counter[str | None] = Counter()  # of each owner

    @property
    def num_bytes(self) -> int:
        """The bytes of all that is held."""
        return self._num_bytes.total()

    def item(self, item_id: str) -> tuple[str | None, Item] | None:
        """Returns an item of a stored request or answer, and its owner."""
        holder = self._holders.get(item_id)
        if holder is None:
            return None
        return holder.owner, ITEM.validate_json((holder.inputs | holder.outputs)[item_id])

    def add(
        self, owner: str | None, response: dict[str, Any], previous: StoredResponse | None, items: Sequence[Item]
    ) -> None:
        """Stores a response, and deletes old ones if there are too many. previous: the response that it continues.
        items: the request's own. A conversation that is too long for the store is not stored, and nothing is deleted
        for it. Nor is a response whose id is taken, as "a" and "resp_a" of two requests at once are the same."""
        inputs = {
            f"{response['id']}-input-{index}": ITEM.dump_json(item, exclude_none=True)
            for index, item in enumerate(items)
        }
        outputs = {
            item.id or "": ITEM.dump_json(item, exclude_none=True)
            for item in OUTPUT.validate_python(response["output"])
        }
        stored = StoredResponse(owner, json.dumps(response).encode(), previous, inputs, outputs)
        if stored.num_held_bytes > MAX_BYTES or response["id"] in self.responses:
            return
        self.responses[response["id"]] = stored
        self._holders |= dict.fromkeys((*inputs, *outputs), stored)
        self._hold(stored)
        while len(self.responses) > MAX_RESPONSES:
            self._delete_oldest(Counter(each.owner for each in self.responses.values()))
        while self.num_bytes > MAX_BYTES:
            self._delete_oldest(self._num_bytes)

    def delete(self, response_id: str) -> None:
        stored = self.responses.pop(response_id)
        for item_id in (*stored.inputs, *stored.outputs):
            del self._holders[item_id]
        self._release(stored)

    def _hold(self, stored: StoredResponse | None) -> None:
        """Holds a response, and those before it that nothing else holds: they may have been deleted since the request
        that continues them began."""
        while stored is not None:
            stored.uses += 1
            if stored.uses > 1:
                return
            self._num_bytes[stored.owner] += stored.num_bytes
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:  # those before it, if nothing else holds them
            stored.uses -= 1
            if stored.uses:
                return
            self._num_bytes[stored.owner] -= stored.num_bytes
            stored = stored.previous

    def _delete_oldest(self, used: Counter[str | None]) -> None:
        """used: how much each owner has."""
        owners = {each.owner for each in self.responses.values()}
        greediest = max(owners, key=lambda owner: used[owner])
        self.delete(next(key for key, each in self.responses.items() if each.owner == greediest))
