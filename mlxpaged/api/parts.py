"""An answer in parts (text, thinking, tool calls), as both APIs are given it: one by one, or collected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    """The call is complete, its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """What had begun as a call is none. text: all of it, as the model wrote it."""

    index: int
    text: str


Part = Text | Thinking | CallStart | CallArguments | CallEnd | CallBroken


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
    def of(cls, parts: Iterable[Part]) -> Message:
        message = cls()
        for part in parts:
            message.add(part)
        return message

    def add(self, part: Part) -> None:
        match part:
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
