"""Defines a table of request fields: what happens to those that the model of a body does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    ALIAS = "alias"  # another name of a field
    LABEL = "label"  # accepted; it does not change the answer
    IGNORED = "ignored"  # accepted without effect, and named in the response's header; refused with --strict
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """One field, or one kind of its values.

    field: its path, without the indices of lists; "*.name" is a field of any object in the body. example: these fields,
    added to the smallest body, have this outcome. note: why. of: the path of the field that an alias sets. neutral:
    values that change nothing, and are accepted. only_with: the field has an effect only if this one has a value other
    than 0. beside: if this field has a value, a refused one is ignored instead. yields: an alias that is ignored beside
    the field that it stands for. code: of the refusal.
    """

    field: str
    outcome: Outcome
    example: Mapping[str, Any]
    note: str = ""
    of: str = ""
    neutral: tuple[Any, ...] = ()
    only_with: str = ""
    beside: str = ""
    yields: bool = False
    code: str = "unsupported_parameter"

    def changes_nothing(self, value: Any, fields: Mapping[str, Any]) -> bool:
        """fields: of the object that has this one."""
        unused = bool(self.only_with) and not fields.get(self.only_with)
        return self.outcome is Outcome.LABEL or unused or value is None or value in self.neutral

    @property
    def refusal(self) -> str:
        return f"this parameter is not supported: {self.note.replace('`', '')}"


UNKNOWN = Row("", Outcome.IGNORED, {})


class Table:
    """The rows of an endpoint. If the model of the body has a field, the model decides what happens to it; otherwise
    the field's row does. A field without a row is ignored. tests/compatibility/ says the rest."""

    def __init__(self, *rows: Row) -> None:
        self.rows = rows
        self.spread = frozenset(row.field for row in rows if row.outcome is Outcome.ALIAS and not row.of)
        """Fields that are objects of other fields of the body."""
        self._by_path = {row.field: row for row in rows}
        self._anywhere = {row.field[2:]: row for row in rows if row.field.startswith("*.")}

    def find(self, place: str, name: str) -> Row:
        """place: the path of the object that has the field, with a dot at its end, or ""."""
        return self._by_path.get(place + name) or self._anywhere.get(name) or UNKNOWN


def row(outcome: Outcome, field: str, value: Any, note: str, also: Mapping[str, Any], **others: Any) -> Row:
    """value, also: the example has this value of the body's field, and these other fields."""
    return Row(field, outcome, {field.split(".")[0]: value, **also}, note, **others)


def label(field: str, value: Any, note: str = "", **also: Any) -> Row:
    return row(Outcome.LABEL, field, value, note, also)


def alias(
    field: str, value: Any, of: str, note: str = "", neutral: tuple[Any, ...] = (), yields: bool = False, **also: Any
) -> Row:
    """of: "" for an object whose fields are others of the body."""
    return row(Outcome.ALIAS, field, value, note, also, of=of, neutral=neutral, yields=yields)


def ignored(field: str, value: Any, note: str, neutral: tuple[Any, ...] = (), **also: Any) -> Row:
    return row(Outcome.IGNORED, field, value, note, also, neutral=neutral)


def refused(
    field: str,
    value: Any,
    note: str = "",
    neutral: tuple[Any, ...] = (),
    only_with: str = "",
    code: str = Row.code,
    beside: str = "",
    **also: Any,
) -> Row:
    others = {"neutral": neutral, "only_with": only_with, "code": code, "beside": beside}
    return row(Outcome.REFUSED, field, value, note, also, **others)
