"""Defines the deltas by which an answer grows: text, thinking and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Thinking:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call. index: counts the calls of an answer from 0. text: the arguments, a JSON object."""

    index: int
    call_id: str
    name: str
    text: str


Delta = Text | Thinking | ToolCall
