"""Keeps the newest responses in memory, so that clients can read and continue them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from mlxpaged.api.openai.responses.schema import Item, OutputItem

MAX_RESPONSES = 1000
MAX_CHARS = 64 * 1024 * 1024
"""The most characters of all responses and inputs. Items that a response shares with earlier ones count once."""

OUTPUT: TypeAdapter[list[OutputItem]] = TypeAdapter(list[OutputItem])


@dataclass(frozen=True)
class StoredResponse:
    """owner: the name of its API key, if any. conversation: all items up to the end of the answer, without the
    instructions. inputs: the request's items, by their ids."""

    owner: str | None
    response: dict[str, Any]
    conversation: Sequence[Item]
    inputs: dict[str, Item]
    num_chars: int


class ResponseStore:
    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.items: dict[str, tuple[str | None, Item]] = {}  # (owner, item) by id, of requests and answers
        self._num_chars = 0

    def add(self, owner: str | None, response: dict[str, Any], earlier: Sequence[Item], items: Sequence[Item]) -> None:
        """Stores a response, and deletes the oldest ones if there are too many. items: the request's own."""
        inputs = {f"{response['id']}-input-{index}": item for index, item in enumerate(items)}
        output = OUTPUT.validate_python(response["output"])
        num_chars = len(json.dumps(response)) + sum(len(item.model_dump_json()) for item in items)
        conversation = [*earlier, *items, *output]
        self.responses[response["id"]] = StoredResponse(owner, response, conversation, inputs, num_chars)
        named = inputs | {item.id: item for item in output if item.id is not None}
        self.items.update({item_id: (owner, item) for item_id, item in named.items()})
        self._num_chars += num_chars
        while len(self.responses) > MAX_RESPONSES or (self._num_chars > MAX_CHARS and len(self.responses) > 1):
            self.delete(next(iter(self.responses)))

    def delete(self, response_id: str) -> None:
        found = self.responses.pop(response_id)
        self._num_chars -= found.num_chars
        for item_id in (*found.inputs, *(item["id"] for item in found.response["output"])):
            del self.items[item_id]
