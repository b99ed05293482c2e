"""Constraints on an answer: a schema, regular expression, choice or grammar for its text, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlxpaged.formats.pieces import Either, Json, Lark, Listed, Piece

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


class GrammarError(ValueError):
    """A constraint cannot be enforced, or an answer violates it. param: the request's field that is wrong, if it is not
    the field of the whole constraint."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Constraint:
    """A JSON schema, a regular expression, a JSON list of strings to choose from, or a grammar in Lark's or GBNF's
    notation. param: the request's field that contains it, for error messages. is_strict: whether a schema is refused if
    it has what cannot be enforced; else that is ignored by name. None if the request cannot choose: it is refused."""

    kind: ConstraintKind
    text: str
    param: str = field(default="constraint", compare=False)
    is_strict: bool | None = field(default=None, compare=False)


Thinking = Literal["never", "may", "open"]
"""Whether an answer never thinks, may begin with a think block, or continues the block that its prompt opened."""


@dataclass(frozen=True)
class ToolCallForm:
    """How a model writes the calls of one tool, after the tag that opens them. param: as in `Constraint`."""

    pieces: tuple[Piece, ...]
    param: str = field(default="constraint", compare=False)


@dataclass(frozen=True)
class StructuredOutput:
    """An answer with optional thinking, and text or tool calls.

    think_start, think_end: the tags of a think block; empty if the model has none. text: the constraint of an answer
    without calls; "free" for any text, which calls may follow; None if the answer must be a call. calls: the allowed
    calls. one_call: whether only one of them may be made. call_start: the tag that opens a call. text_start: the tag
    before the text of an answer without calls, if there is one. param: as in `Constraint`.
    """

    thinking: Thinking
    think_start: str
    think_end: str
    text: Constraint | Literal["free"] | None
    call_start: str = ""
    calls: tuple[ToolCallForm, ...] = ()
    one_call: bool = False
    text_start: str = ""
    param: str = field(default="constraint", compare=False)

    @property
    def parts(self) -> tuple[Constraint, ...]:
        """The constraints in it, each once."""
        of_calls = (each for call in self.calls for each in constraints_in(call.pieces, call.param))
        return tuple(dict.fromkeys((*of_calls, self.text) if isinstance(self.text, Constraint) else of_calls))

    @property
    def spaced(self) -> bool:
        """Whether line breaks may come before the answer, as models write them after thinking. They may not if they
        could be part of the text."""
        is_json = isinstance(self.text, Constraint) and self.text.kind == "json_schema"
        return self.thinking != "never" and not self.text_start and (self.text is None or is_json)


def constraints_in(pieces: Iterable[Piece], param: str = "constraint") -> Iterator[Constraint]:
    for piece in pieces:
        match piece:
            case Json(schema):
                yield Constraint("json_schema", schema, param)
            case Lark(grammar):
                yield Constraint("grammar", grammar, param)
            case Listed(items):
                for _, item in items:
                    yield from constraints_in(item, param)
            case Either(ways):
                for way in ways:
                    yield from constraints_in(way, param)
