"""The items of a response, and their events: each item is announced, grows, and is done before the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlxpaged.api.generation.deltas import CallArguments, CallBroken, CallEnd, CallStart, Delta, Text, Thinking
from mlxpaged.api.request_id import new_id

Event = tuple[str, dict[str, Any]]
"""Its type without "response.", and its fields."""


class OutputItems:
    """Makes them from the deltas of an answer. Read an event before asking for the next one: its item still grows."""

    def __init__(self, called_as: Mapping[str, dict[str, str]]) -> None:
        """called_as: by a tool's name for the model, the fields that name it in the API's calls."""
        self._called_as = called_as
        self.items: list[dict[str, Any]] = []
        """Those that are done."""
        self._open: dict[str, Any] = {}  # the one that is being made, if any
        self._index = -1  # of the open one, among all that were announced
        self._logprobs: list[dict[str, Any]] = []  # of tokens that have not become text

    def add(self, deltas: list[Delta], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """logprobs: of the tokens that came with these deltas. They stay with the text that the tokens become."""
        self._logprobs += logprobs
        for delta in deltas:
            match delta:
                case Text(text):
                    yield from self._add_text(text)
                case Thinking(text):
                    self._logprobs = []
                    if self._open.get("type") != "reasoning":
                        yield from self._begin({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []})
                        yield from self._add_part({"type": "reasoning_text", "text": ""})
                    self._open["content"][0]["text"] += text
                    yield "reasoning_text.delta", self._place(content_index=0, delta=text)
                case CallStart(_, call_id, name):
                    call = {"id": new_id("fc"), "type": "function_call", "call_id": call_id, **self._called_as[name]}
                    yield from self._begin(call | {"arguments": ""})
                case CallArguments(_, text):
                    self._open["arguments"] += text
                    yield "function_call_arguments.delta", self._place(delta=text)
                case CallEnd():
                    self._logprobs = []
                    yield from self._end("completed")
                case CallBroken(_, text):
                    # The announced item cannot be taken back: it ends incomplete, and the response does not have it.
                    self._open["status"] = "incomplete"
                    yield "output_item.done", {"output_index": self._index, "item": self._open}
                    self._open = {}
                    yield from self._add_text(text)

    def finish(self, complete: bool) -> Iterator[Event]:
        """complete: whether the answer came to its end. An answer without items is an empty message."""
        if (self._open.get("type") == "message" and self._logprobs) or not (self.items or self._open):
            yield from self._add_text("")
        yield from self._end("completed" if complete else "incomplete")

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._open.get("type") != "message":
            yield from self._begin({"id": new_id("msg"), "type": "message", "role": "assistant", "content": []})
            yield from self._add_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        logprobs, self._logprobs = self._logprobs, []
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield "output_text.delta", self._place(content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        self._index += 1
        self._open = item | {"status": "in_progress"}
        yield "output_item.added", {"output_index": self._index, "item": self._open}

    def _add_part(self, part: dict[str, Any]) -> Iterator[Event]:
        self._open["content"].append(part)
        yield "content_part.added", self._place(content_index=0, part=part)

    def _end(self, status: str) -> Iterator[Event]:
        item, place = self._open, self._place(content_index=0)
        if not item:
            return
        if item["type"] == "function_call":
            # The name is for clients of before 2026, which have it among the fields that must be there.
            yield "function_call_arguments.done", self._place(name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                yield "output_text.done", place | {"text": part["text"], "logprobs": part["logprobs"]}
            else:
                yield "reasoning_text.done", place | {"text": part["text"]}
            yield "content_part.done", place | {"part": part}
        item["status"] = status
        self.items.append(item)
        self._open = {}
        yield "output_item.done", {"output_index": self._index, "item": item}

    def _place(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self._open.get("id"), "output_index": self._index, **fields}
