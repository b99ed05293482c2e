"""Defines what one step adds to an answer, and the parts of a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs
from mlxpaged.core.engine.timeline import Timeline
from mlxpaged.core.text.deltas import Delta, Text, Thinking, ToolCall

__all__ = ["Delta", "Finish", "Part", "Text", "Thinking", "ToolCall", "Update", "Usage", "joined"]


@dataclass(frozen=True)
class Finish:
    """Says why an answer ended. reason: "stop" or "length". stop_string: the one that ended it, if any. num_calls: the
    number of complete calls. stop_cause: as in RequestOutput."""

    reason: str
    stop_string: str | None = None
    num_calls: int = 0
    timeline: Timeline | None = None
    stop_cause: str | None = None


class Update(NamedTuple):
    """What one step adds to one choice. thinking: whether its tokens are part of the thinking. prompt_logprobs: in the
    first update, if they were asked for. It is a tuple to be cheap: there is one for every token."""

    choice: int
    deltas: list[Delta]
    logprobs: Sequence[TokenLogprobs] = ()
    thinking: bool = False
    finish: Finish | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class Usage:
    """Counts the tokens of a request so far. A prompt counts once, even if it gets several answers. Every generated
    token counts. cached: tokens of the prompt. thinking: tokens of the completion. drafted, accepted: draft tokens that
    were verified, and those of them that are tokens of the completion."""

    prompt: int
    cached: int
    completion: int
    thinking: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Part:
    """A part of a whole answer: text, thinking, or the arguments of a call."""

    kind: type[Text] | type[Thinking] | ToolCall
    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def joined(deltas: Iterable[Delta]) -> list[Part]:
    """Returns a whole answer in the order in which the model wrote it."""
    parts: list[Part] = []
    for delta in deltas:
        kind = delta if isinstance(delta, ToolCall) else type(delta)
        if not parts or parts[-1].kind is not kind:
            parts.append(Part(kind, []))
        parts[-1].pieces.append(delta.text)
    return parts
