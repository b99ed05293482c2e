"""An answer as it grows: the deltas of its text, its thinking and its tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mlxpaged.engine import Timeline, TokenLogprobs


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Thinking:
    text: str


@dataclass(frozen=True)
class CallStart:
    """index: counts the calls of an answer from 0, the broken ones included."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments' JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete. Its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """What began as a call is none. text: all of it, as the model wrote it."""

    index: int
    text: str


Delta = Text | Thinking | CallStart | CallArguments | CallEnd | CallBroken


@dataclass(frozen=True)
class Finish:
    """Why an answer ended. reason: "stop" or "length". stop_string: the one that ended it, if any. num_calls: those
    that are complete."""

    reason: str
    stop_string: str | None = None
    num_calls: int = 0
    timeline: Timeline | None = None


class Update(NamedTuple):
    """What one step adds to one choice. thinking: whether its tokens are part of the thinking. A tuple, since there is
    one for every token."""

    choice: int
    deltas: list[Delta]
    logprobs: tuple[TokenLogprobs, ...] = ()
    thinking: bool = False
    finish: Finish | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far. A prompt counts once, however many answers it gets; every generated token counts.
    cached: of the prompt. thinking: of the completion."""

    prompt: int
    cached: int
    completion: int
    thinking: int


@dataclass
class ToolCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A whole answer. Calls that broke are part of its text."""

    text: str = ""
    thinking: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Message:
        message = cls()
        for delta in deltas:
            message.add(delta)
        return message

    def add(self, delta: Delta) -> None:
        match delta:
            case Text(text):
                self.text += text
            case Thinking(text):
                self.thinking += text
            case CallStart(index, call_id, name):
                self.calls[index] = ToolCall(call_id, name)
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallBroken(index, text):
                del self.calls[index]
                self.text += text
