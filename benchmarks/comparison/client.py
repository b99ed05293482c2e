"""One streamed chat completion, with the time of every piece of its answer.

A thread per open request, on the standard library's HTTP client, which reads a chunk in tens of microseconds: the
client shares the machine's cores with the server that it measures.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

RETRIES, RETRY_SECONDS = 2, 0.5
"""As OpenAI's client has them: a connection that is reset before any answer is tried again."""


@dataclass
class Answer:
    """What became of a request. Times are time.perf_counter()'s, in seconds."""

    role: str
    """Its part in the load, for example "stream" or "long"."""
    asked_tokens: int
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    """Of every event with text in it. A server may put several tokens into one."""
    ended: float = 0.0
    text: str = ""
    """Of the answer itself, which a client sends back with its next turn; thinking that came before it is left out."""
    has_thinking: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server's usage has it; of an answer without usage, the number of its chunks."""
    cached_tokens: int | None = None
    """None if the server does not tell."""
    retries: int = 0
    error: str | None = None
    gave_up: bool = False
    """After waiting for it until time was up. How long it took is then at least how long it was waited for."""

    @property
    def ttft(self) -> float | None:
        """Where no text came before time was up, that time."""
        if self.chunk_times:
            return self.chunk_times[0] - self.sent
        return self.seconds if self.gave_up else None

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    def gaps(self, end: float) -> list[float]:
        """Seconds between one event with text and the next, up to `end`: what a reader of the stream waits. The wait
        that was not over then, or when time was up, counts as long as it had lasted."""
        times = [moment for moment in self.chunk_times if moment <= end]
        if times and (self.ended > end or self.gave_up):
            times.append(min(self.ended, end))
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True)
class Client:
    """Sends requests to one server. deadline: when (perf_counter) unfinished requests are given up."""

    port: int
    model: str
    deadline: float
    request_seconds: float

    def ask(self, messages: list[Message], max_tokens: int, role: str = "request") -> Answer:
        """Never raises: what goes wrong is the answer's error."""
        answer = Answer(role, max_tokens, time.perf_counter())
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        give_up = min(self.deadline, answer.sent + self.request_seconds)
        try:
            while not self._stream_or_reset(body, answer, give_up):
                answer.retries += 1
                time.sleep(RETRY_SECONDS)
        except TimeoutError:
            answer.gave_up = give_up > answer.sent
            answer.error = "the load's time was up" if give_up == self.deadline else "timed out"
        except Exception as error:  # a server may send anything, or nothing
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        answer.output_tokens = answer.output_tokens or len(answer.chunk_times)
        if answer.error is None and not answer.chunk_times:
            answer.error = "an answer without text"
        return answer

    def _stream_or_reset(self, body: dict[str, Any], answer: Answer, give_up: float) -> bool:
        """False if the connection was reset and may be tried again."""
        try:
            self._stream(body, answer, give_up)
        except ConnectionResetError:
            if answer.chunk_times or answer.retries == RETRIES:
                raise
            return False
        return True

    def _stream(self, body: dict[str, Any], answer: Answer, give_up: float) -> None:
        remaining = give_up - time.perf_counter()
        if remaining <= 0:
            raise TimeoutError
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=remaining)
        try:
            connection.connect()
            stream: socket.socket = connection.sock  # the connection forgets it where the response ends with it
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
            for now, data in events(response, stream, give_up):
                if data == "[DONE]":
                    return
                take(answer, json.loads(data), now)
            if answer.prompt_tokens == 0:
                raise ValueError("the stream ended before its end")
        finally:
            connection.close()


def events(response: http.client.HTTPResponse, stream: socket.socket, give_up: float) -> Iterator[tuple[float, str]]:
    """The `data:` lines of an event stream, each with the time when its last byte was there. Raises TimeoutError."""
    rest = b""
    while True:
        remaining = give_up - time.perf_counter()
        if remaining <= 0:
            raise TimeoutError
        if stream.fileno() >= 0:
            stream.settimeout(remaining)
        piece = response.read1(1 << 16)
        now = time.perf_counter()
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip().decode()


def take(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Raises ValueError on an event that is an error."""
    if event.get("error"):
        raise ValueError(f"error in the stream: {str(event['error'])[:300]}")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thinking = delta.get("reasoning_content") or delta.get("reasoning")  # both names are in use
        if text or thinking:
            answer.chunk_times.append(now)
            answer.text += text
            answer.has_thinking |= bool(thinking)
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            answer.cached_tokens = details["cached_tokens"]
