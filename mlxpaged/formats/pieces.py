"""What the calls of a tool are made of, for the grammar that enforces them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpaged.formats.schemas import NOTES, Schema, choices, enumerated, required, resolved, types_of
from mlxpaged.formats.string_formats import STRING_FORMATS

ANY_OBJECT: Schema = {"type": "object"}
ROOT = "root"
"""The name of the whole schema within that of an argument."""
LARK = "x-lark"
"""A word in the schema of a string: its `Grammar`. The server writes it; in a client's schema it is a text like any
other."""
OF_STRINGS = {"pattern", "format", "minLength", "maxLength"}
OF_UNIONS = ("anyOf", "oneOf", "allOf")


class Grammar(str):
    """A grammar in Lark's notation."""


class InexpressibleError(ValueError):
    """A schema cannot be enforced in a format."""


@dataclass(frozen=True)
class Json:
    """schema: as JSON."""

    schema: str


@dataclass(frozen=True)
class Raw:
    """Text as it is, and the tag after it. choices: the only texts; None for any without the tag. lengths: characters;
    None for any number of them. patterns: regular expressions, of each of which a part of the text is an example."""

    end: str
    choices: tuple[str, ...] | None = None
    lengths: tuple[int, int | None] = (0, None)
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lark:
    """Text as it is that a grammar in Lark's notation accepts, and the tag after it."""

    grammar: str
    end: str


@dataclass(frozen=True)
class Listed:
    """Items in this order, with separators between them. items: each with whether it must be there."""

    items: tuple[tuple[bool, tuple[Piece, ...]], ...]
    separator: str = ""


@dataclass(frozen=True)
class Either:
    """One of several ways to write the same."""

    ways: tuple[tuple[Piece, ...], ...]


Piece = str | Json | Raw | Lark | Listed | Either


def object_of(schema: Schema | None) -> Json:
    """Raises InexpressibleError for a string with a grammar: its quotes and escapes are no part of the grammar."""
    given = (schema or {}).get("properties")
    if isinstance(given, Mapping) and any(grammar_of(each) is not None for each in given.values()):
        raise InexpressibleError("a grammar in Lark's notation does not hold for a string in JSON")
    return Json(json.dumps(ANY_OBJECT if schema is None else schema))


def grammar_of(schema: Any) -> Grammar | None:
    grammar = schema.get(LARK) if isinstance(schema, Mapping) else None
    return grammar if isinstance(grammar, Grammar) else None


def self_contained(schema: Schema, root: Schema) -> Schema:
    """Returns the schema of an argument for a grammar of its own: what it refers to comes with it."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(moved, value))
        if not isinstance(value, Mapping):
            return value
        inner = {key: moved(each) for key, each in value.items()}
        if isinstance(reference := value.get("$ref"), str) and reference.startswith("#"):
            inner["$ref"] = f"#/$defs/{ROOT}{reference[1:]}"
        return inner

    return {**moved(schema), "$defs": {ROOT: moved(root)}} if '"$ref"' in json.dumps(schema) else schema


def properties(schema: Schema) -> dict[str, tuple[Any, bool]]:
    """Returns the schema of each argument, and whether it is required. Raises InexpressibleError if they cannot be
    listed."""
    given = schema.get("properties", {})
    others = [word for word in ("$ref", *OF_UNIONS, "patternProperties", "if", "not") if word in schema]
    must = required(schema)
    if others or not isinstance(given, Mapping):
        raise InexpressibleError(f"arguments cannot be listed, because of {', '.join(others) or 'properties'}")
    if unknown := [key for key in must if key not in given]:
        raise InexpressibleError(f"the required argument {unknown[0]!r} is not among the properties")
    if not given and schema.get("additionalProperties", False) is not False:
        raise InexpressibleError("arguments with any names cannot be listed")
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    too_few = isinstance(least, int | float) and least > len(set(must))
    if too_few or (isinstance(most, int | float) and most < len(given)):
        raise InexpressibleError("arguments that are listed cannot be counted")
    return {key: (each, key in must) for key, each in given.items()}


def without_null(schema: Any, root: Schema) -> Any:
    """Returns the schema of a text that may also be null, without the null; None for any other schema."""
    own = resolved(schema, root)
    if types_of(own, root) != {"string", "null"} or enumerated(own, root) is not None:
        return None
    if isinstance(own.get("type"), list):
        return {**own, "type": "string"}
    options = [each for each in choices(own) if types_of(each, root) != {"null"}]
    rest = {word for word in own if word not in NOTES}
    return options[0] if len(options) == 1 and len(rest) == 1 else None


def argument(schema: Any, root: Schema, end: str, is_told: bool = False) -> tuple[bool, tuple[Piece, ...]]:
    """Returns whether an argument is written as a string, and its pieces, to the tag `end`. What may be a string is
    one, because that is how it is read. is_told: whether the tag says whether it is a string."""
    if schema is False:
        raise InexpressibleError("no value fits one of the properties")
    if (grammar := grammar_of(schema)) is not None:
        return True, (Lark(grammar, end),)
    values, types = enumerated(schema, root), types_of(schema, root)
    if values is not None:
        is_string = all(isinstance(value, str) for value in values)
        raw = is_string or not is_told
        texts = tuple(value if raw and isinstance(value, str) else json.dumps(value) for value in values)
        return is_string, (Raw(end, texts),)
    if types is not None and "string" not in types:
        return False, (Json(json.dumps(self_contained(schema, root))), end)
    if (text := without_null(schema, root)) is not None and not is_told:
        written = argument(text, root, end)[1]
        return True, written if written == (Raw(end),) else (Either((written, (f"null{end}",))),)
    own = resolved(schema, root)
    if any(OF_STRINGS & resolved(each, root).keys() for word in OF_UNIONS for each in own.get(word) or ()):
        raise InexpressibleError("limits of a string in a union")
    lengths = (own.get("minLength", 0), own.get("maxLength"))
    patterns = (own.get("pattern"), STRING_FORMATS.get(own["format"]) if isinstance(own.get("format"), str) else None)
    return True, (Raw(end, lengths=lengths, patterns=tuple(filter(None, patterns))),)
