"""What an answer, or the text in it, must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """What form an answer must have: that of a JSON schema, a regular expression, one of a JSON list of strings, or a
    grammar in Lark's or GBNF's notation. param: the field of the request that asks for it, for messages."""

    kind: ConstraintKind
    text: str
    param: str = field(default="constraint", compare=False)


Thinking = Literal["never", "may", "open"]
"""Whether an answer may begin with a think block, or continues the one that its prompt opened."""


@dataclass(frozen=True)
class ToolCallForm:
    """The calls of one tool. before: what is written between the opening tag and the arguments. arguments: their JSON
    schema. after: what is written behind them, up to the end of the call."""

    before: str
    arguments: Constraint
    after: str


@dataclass(frozen=True)
class StructuredOutput:
    """think_start, think_end: the tags of a think block; empty where the model has none, and "never" thinks.

    text: what the answer is where it is no call; "free" for any text, behind which there may be calls; None where it
    must be a call. calls: those that may be made, one of them where `one_call`, else any number. call_start: the tag
    that opens each. param: as a constraint's.
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
        """Whether line breaks may come first, as models write them behind their thoughts: not where they could be part
        of the text."""
        is_json = isinstance(self.text, Constraint) and self.text.kind == "json_schema"
        return self.thinking != "never" and (self.text is None or is_json)
