"""One streamed answer of a server: its pieces as they come, and what it came to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from mlxpaged.cli.client import Client, Comment, ServerError

PATH = "/v1/chat/completions"


@dataclass
class Answer:
    text: str = ""
    thinking: str = ""
    finish_reason: str | None = None
    """None as long as the answer is not complete."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    """Tokens of the answer and its thinking. 0 if the answer was ended early: the server counts at the end."""
    ttft: float | None = None
    """Seconds until the first token, as the client sees it."""
    seconds: float = 0.0
    """Seconds until the last token so far."""

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the speed after the first token, None if it is not known."""
        if self.ttft is None or self.num_tokens < 2 or self.seconds <= self.ttft:
            return None
        return (self.num_tokens - 1) / (self.seconds - self.ttft)


@dataclass(frozen=True)
class Piece:
    """kind: "progress" says how far a request is that has no text yet."""

    kind: Literal["text", "thinking", "progress"]
    text: str


def pieces(client: Client, body: dict[str, Any], answer: Answer) -> Generator[Piece, None, None]:
    """Sends the request and adds to `answer` what comes. Closing the iterator ends the request. Raises ServerError."""
    start = time.monotonic()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with contextlib.closing(client.stream(PATH, body)) as events:
        for event in events:
            if isinstance(event, Comment):
                yield Piece("progress", event.text)
                continue
            if (usage := event.get("usage")) is not None:
                answer.num_prompt_tokens, answer.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            for choice in event["choices"]:
                delta = choice["delta"]
                thinking, text = delta.get("reasoning_content") or "", delta.get("content") or ""
                answer.finish_reason = choice["finish_reason"]
                if thinking or text:
                    answer.seconds = time.monotonic() - start
                    answer.ttft = answer.seconds if answer.ttft is None else answer.ttft
                    answer.thinking += thinking
                    answer.text += text
                if thinking:
                    yield Piece("thinking", thinking)
                if text:
                    yield Piece("text", text)
    if answer.finish_reason is None:
        raise ServerError("the answer has ended early: the server has closed the connection")
