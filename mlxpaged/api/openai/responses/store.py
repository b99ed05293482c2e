"""Answers that can be asked for again and continued: in memory, the newest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxpaged.api.openai.responses.schema import ResponseRequest

MAX_RESPONSES = 1000
MAX_CHARS = 64 * 1024 * 1024
"""Of all that is new in them: a conversation's earlier messages are shared with the answers before."""


@dataclass(frozen=True)
class StoredResponse:
    """owner: the name of the key that it belongs to, if any. conversation: all messages up to and with the answer, but
    for instructions. items: those of the request."""

    owner: str | None
    response: dict[str, Any]
    conversation: Sequence[dict[str, Any]]
    items: Sequence[dict[str, Any]]
    num_chars: int


class ResponseStore:
    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._num_chars = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def add(
        self,
        owner: str | None,
        response: dict[str, Any],
        body: ResponseRequest,
        earlier: Sequence[dict[str, Any]],
        answer: str,
    ) -> None:
        """Forgets the oldest ones where there are too many."""
        new = [*body.messages(), {"role": "assistant", "content": answer}]
        num_chars = sum(len(message["content"]) for message in new) + len(body.instructions or "")
        items = [
            {
                "id": f"{response['id']}-input-{index}",
                "type": "message",
                "role": message["role"],
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": message["content"], "annotations": []}
                    if message["role"] == "assistant"
                    else {"type": "input_text", "text": message["content"]}
                ],
            }
            for index, message in enumerate(body.messages())
        ]
        self._responses[response["id"]] = StoredResponse(owner, response, [*earlier, *new], items, num_chars)
        self._num_chars += num_chars
        while len(self._responses) > MAX_RESPONSES or (self._num_chars > MAX_CHARS and len(self._responses) > 1):
            self.delete(next(iter(self._responses)))

    def delete(self, response_id: str) -> None:
        self._num_chars -= self._responses.pop(response_id).num_chars
