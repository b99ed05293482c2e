"""The events of a streamed message, in Anthropic's order: each block starts, grows and stops before the next one."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

from mlxpaged.api.parts import CallArguments, CallBroken, CallStart, Part, Text, Thinking
from mlxpaged.api.streaming import event


def named_event(data: dict[str, Any]) -> str:
    return f"event: {data['type']}\n{event(data)}"


def signature(thinking: str) -> str:
    """Clients keep it with a thinking block and send both back; here it is a digest that nobody has to check."""
    return hashlib.sha256(thinking.encode()).hexdigest()


SEALED = "thinking:"


def seal(thinking: str) -> str:
    """The signature of a block whose text is not shown: it brings the text back, for the server keeps none."""
    return SEALED + base64.b64encode(thinking.encode()).decode()


def unseal(signature: str) -> str:
    """The thinking that a signature holds; none in those of other servers."""
    if not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""


class BlockEvents:
    """Makes the events of one message from its parts. omit_thinking: without the text of its thinking."""

    def __init__(self, omit_thinking: bool) -> None:
        self._omit_thinking = omit_thinking
        self._index = -1
        self._open: str | None = None  # the type of the block that has started
        self._thinking = ""

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Text(text) | CallBroken(_, text):
                yield from self._start("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Thinking(text):
                yield from self._start("thinking", {"thinking": "", "signature": ""})
                self._thinking += text
                if not self._omit_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                yield from self.close()
                yield from self._start("tool_use", {"id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Stop the block that has started, if any."""
        if self._open is None:
            return
        if self._open == "thinking":
            sign = seal if self._omit_thinking else signature
            yield self._delta({"type": "signature_delta", "signature": sign(self._thinking)})
            self._thinking = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _start(self, kind: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A block of that type, unless the one that has started is."""
        if self._open == kind:
            return
        yield from self.close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind} | content}
        if self._index == 0:
            yield {"type": "ping"}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
