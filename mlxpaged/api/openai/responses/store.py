"""Keeps the newest responses in memory, so that clients can read and continue them.

What is kept is serialized: a `{}` of two bytes takes thirty times as much as an object. A response holds its own items
and the response that it continues, whose items it needs for as long. All that is held counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic_core import to_json

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


Key = tuple[str | None, str]
"""An owner and an id. One API key learns nothing of the ids that another one uses."""


class ResponseStore:
    """Belongs to the event loop, but any thread may add a response: large ones are rendered on a thread."""

    def __init__(self) -> None:
        self._changes = threading.RLock()
        self.responses: dict[Key, StoredResponse] = {}
        self._holders: dict[Key, StoredResponse] = {}  # by the ids of their items
        self._num_bytes: Counter[str | None] = Counter()  # of each owner

    @property
    def num_bytes(self) -> int:
        """The bytes of all that is held."""
        return self._num_bytes.total()

    def find(self, owner: str | None, response_id: str, any_owner: bool = False) -> StoredResponse | None:
        """Returns the owner's response with this id. any_owner: or else another owner's."""
        return found_in(self.responses, (owner, response_id), any_owner)

    def item(self, owner: str | None, item_id: str, any_owner: bool = False) -> bytes | None:
        """Returns the JSON of an item of a stored request or answer."""
        holder = found_in(self._holders, (owner, item_id), any_owner)
        return None if holder is None else holder.inputs.get(item_id) or holder.outputs[item_id]

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
        stored = StoredResponse(owner, to_json(response), previous, inputs, outputs)
        with self._changes:
            if stored.num_held_bytes > MAX_BYTES or (owner, response["id"]) in self.responses:
                return
            self.responses[owner, response["id"]] = stored
            self._holders |= {(owner, item_id): stored for item_id in (*inputs, *outputs)}
            self._hold(stored)
            while len(self.responses) > MAX_RESPONSES:
                self._delete_oldest(Counter(each.owner for each in self.responses.values()))
            while self.num_bytes > MAX_BYTES:
                self._delete_oldest(self._num_bytes)

    def delete(self, owner: str | None, response_id: str) -> None:
        """It may have been deleted before."""
        with self._changes:
            if (stored := self.responses.pop((owner, response_id), None)) is not None:
                for item_id in (*stored.inputs, *stored.outputs):
                    del self._holders[owner, item_id]
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
        self.delete(*next(key for key in self.responses if key[0] == greediest))


def found_in(stored: dict[Key, StoredResponse], key: Key, any_owner: bool) -> StoredResponse | None:
    if (found := stored.get(key)) is not None or not any_owner:
        return found
    return next((each for (_, name), each in list(stored.items()) if name == key[1]), None)
