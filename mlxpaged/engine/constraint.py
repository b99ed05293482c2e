"""Constraints on an answer: a schema, regular expression, choice or grammar for its text, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """A JSON schema, a regular expression, a JSON list of strings to choose from, or a grammar in Lark's or GBNF's
    notation. param: the request's field that contains it, for error messages."""

    kind: ConstraintKind
    text: str
    param: str = field(default="constraint", compare=False)


Thinking = Literal["never", "may", "open"]
"""Whether an answer never thinks, may begin with a think block, or continues the block that its prompt opened."""


@dataclass(frozen=True)
class ToolCallForm:
    """How a model writes the calls of one tool. before: the text between the opening tag and the arguments. arguments:
    their JSON schema. after: the text from the arguments to the end of the call."""

    before: str
    arguments: Constraint
    after: str


@dataclass(frozen=True)
class StructuredOutput:
    """An answer with optional thinking, and text or tool calls.

    think_start, think_end: the tags of a think block; empty if the model has none. text: the constraint of an answer
    without calls; "free" for any text, which calls may follow; None if the answer must be a call. calls: the allowed
    calls. one_call: whether only one of them may be made. call_start: the tag that opens a call. param: as in
    `Constraint`.
    """

    thinking: Thinking
    think_start: str
    think_end: str
    text: Constraint | Literal["free"] | None
    call_start: str = ""
    calls: tuple[ToolCallForm, ...] = ()
    one_call: bool = False
    param: str = field(default="constraint", compare=False)

    @property
    def parts(self) -> tuple[Constraint, ...]:
        arguments = tuple(call.arguments for call in self.calls)
        return (*arguments, self.text) if isinstance(self.text, Constraint) else arguments

    @property
    def spaced(self) -> bool:
        """Whether line breaks may come before the answer, as models write them after thinking. They may not if they
        could be part of the text."""
        is_json = isinstance(self.text, Constraint) and self.text.kind == "json_schema"
        return self.thinking != "never" and (self.text is None or is_json)
