"""Decides which fields of a body its model sees: known ones and aliases. Other fields are ignored and noted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields.table import Outcome, Row, Table

MAX_NAMES, MAX_NAME = 16, 64
"""At most so many ignored fields are named, by at most so many characters each."""
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a name has neither in a header nor in the log."""


class Reading:
    """One body that is being read. It is the context of pydantic's validation.

    strict: refuse what would be ignored. The time is linear in the size of the body, and the names are bounded.
    """

    def __init__(self, root: type[BaseModel], strict: bool) -> None:
        """root: the model of the body. Its attribute `table` is the table of its fields. conversation: the field of a
        body for text that has the messages or items."""
        self._places = places(root)
        self.conversation = "input" if "input" in root.model_fields else "messages"
        self._table: Table = getattr(root, "table", Table())
        self._strict = strict
        self._ignored: dict[str, None] = {}
        self._more = False

    @property
    def ignored(self) -> list[str]:
        """Names the fields that were ignored, by paths without indices. "..." stands for those beyond the limit."""
        return [*self._ignored, *(["..."] if self._more else [])]

    def known_fields(self, model: type[BaseModel], fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of an object that its model has. Raises ApiError for a field that is refused. If the
        reading is strict, an unknown field stays, for pydantic to refuse it: only one, because pydantic describes each,
        which takes five seconds for a million of them and blocks all threads."""
        place = self._places.get(model, "")
        for name in self._table.spread & fields.keys() if not place else ():
            fields = self._spread(name, fields)
        for name, kinds in numbers_of(model).items():
            if name in fields:
                fields[name] = as_number(fields[name], kinds)
        names = names_of(model)
        if fields.keys() <= names:
            return fields
        found = {name: value for name, value in fields.items() if name in names}
        for name, value in fields.items():
            if name in names:
                continue
            row = self._table.find(place, name)
            if row.changes_nothing(value, fields):
                continue
            if row.outcome is Outcome.REFUSED and not fields.get(row.beside):
                raise bad_parameter(place + name, row.refusal, row.code)
            if row.outcome is Outcome.ALIAS and not (row.yields and found.get(row.of) not in (None, value)):
                set_alias(found, row, value)
            elif self._strict:
                return found | {name: value}
            else:
                self._note(place, name)
        return found

    def _spread(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the body's fields with those of its field `name` beside them. Where they differ, the outer ones hold.
        Raises ApiError for a difference if the reading is strict, and for a value that is no object."""
        outer = {key: value for key, value in fields.items() if key != name}
        inner = {} if fields[name] is None else fields[name]
        if not isinstance(inner, dict):
            raise bad_parameter(name, "must be an object")
        for key in inner.keys() & fields.keys():
            if key == name or inner[key] != outer[key]:
                if self._strict:
                    raise bad_parameter(f"{name}.{key}", f"differs from {key}; give one of them")
                self._note(f"{name}.", key)
        return {key: value for key, value in inner.items() if key != name} | outer

    def leave_out(self, field: str, reason: str) -> None:
        """Notes that a value of a known field is ignored. Raises ApiError if the reading is strict."""
        if self._strict:
            raise bad_parameter(field, reason, code="unsupported_parameter")
        self._note("", field)

    def _note(self, place: str, name: str) -> None:
        if self._more:
            return
        shown = UNSAFE.sub("?", (place + (name[:MAX_NAME] or "?"))[-MAX_NAME:])
        if len(self._ignored) < MAX_NAMES:
            self._ignored[shown] = None
        elif shown not in self._ignored:
            self._more = True


def set_alias(fields: dict[str, Any], row: Row, value: Any) -> None:
    """Sets the field that an alias stands for. Raises ApiError if it has another value."""
    *parents, name = row.of.split(".")
    for parent in parents:
        inner = fields.get(parent)
        if inner is not None and not isinstance(inner, dict):
            return  # this field is refused itself
        fields[parent] = copied = dict(inner or {})
        fields = copied
    if fields.get(name) not in (None, value):
        raise bad_parameter(row.field, f"differs from {row.of}; give one of them")
    fields[name] = value


@cache
def names_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE]-?[0-9]{1,3})?")


@cache
def numbers_of(model: type[BaseModel]) -> dict[str, frozenset[type]]:
    """Returns the fields of a model that are numbers and nothing else, with the kinds of number that each may be."""
    found = {field.alias or name: frozenset(types_in(field.annotation)) for name, field in model.model_fields.items()}
    return {name: kinds for name, kinds in found.items() if kinds and kinds <= {int, float}}


def types_in(annotation: Any) -> Iterator[Any]:
    """Yields the types of a union."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from types_in(part)
    elif annotation is not NoneType:
        yield annotation


def as_number(value: Any, kinds: frozenset[type]) -> Any:
    """Returns the number that a text has, and the whole number that a float is if no other is allowed. Some clients
    write all numbers as texts or as floats. Any other value stays what it is."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value) if {".", "e", "E"} & set(value) else int(value)
    if float not in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@cache
def places(root: type[BaseModel]) -> dict[type[BaseModel], str]:
    """Returns for each model of a body the first place of its objects: "messages.content." for a part of a message."""
    found: dict[type[BaseModel], str] = {}

    def visit(model: type[BaseModel], place: str) -> None:
        if model not in found:
            found[model] = place
            for name, field in model.model_fields.items():
                for inner in models_in(field.annotation):
                    visit(inner, f"{place}{field.alias or name}.")

    visit(root, "")
    return found


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)
