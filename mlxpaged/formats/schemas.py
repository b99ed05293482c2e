"""Strict JSON, and what a JSON schema says about a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mlxpaged.formats.source import NotACall

MAX_DEPTH = 20
"""References and unions that are followed, one in another."""

MAX_NESTING = 100
"""Objects and lists, one in another. Clients could not send back what is nested deeper than 200: the parser of bodies
takes no more."""

TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}

Schema = Mapping[str, Any]

NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Words of a schema that forbid nothing."""


def refuse(*_: object) -> NoReturn:
    raise ValueError


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object. Raises ValueError for a key that is there twice: one of its values would be lost."""
    made = dict(pairs)
    return made if len(made) == len(pairs) else refuse()


def loads(text: str) -> Any:
    """Reads strict JSON. Raises NotACall, also for NaN, half a surrogate pair, a key that is there twice, and more than
    MAX_NESTING."""
    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=once)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise NotACall from None
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        if not inner:
            return value
        level = [each for values in inner for each in values]
    raise NotACall


def resolved(schema: Any, root: Schema) -> Schema:
    """Follows references within the schema."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for part in filter(None, reference[1:].split("/")):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def choices(schema: Schema) -> list[Any]:
    return [each for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) for each in schema[word]]


def required(schema: Schema) -> list[str]:
    """Returns the keys that an object must have. Some clients write `true`, as in JSON Schema's third draft; what is no
    key is left out."""
    given = schema.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "not"}
"""Words whose schemas are for the value itself. They may name members that the schema beside them does not."""


def closed(schema: Schema) -> dict[str, Any]:
    """Returns a tool's schema in which an object has no members but those that are listed, if nothing is said of
    others: a model that must call would invent some. An object without a list is a map, and stays one."""
    joined = _mentions(schema, {"allOf"}) or any(len(each) > 1 for each in _referring(schema))

    def moved(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        made = dict(value)
        for word in ("properties", *(() if joined else ("$defs", "definitions"))):
            if isinstance(given := value.get(word), Mapping):
                made[word] = {key: moved(each) for key, each in given.items()}
        for word in ("items", "additionalProperties"):
            made |= {word: moved(value[word])} if word in value else {}
        for word in ("prefixItems", *(() if joined or "properties" in value else ("anyOf", "oneOf"))):
            if isinstance(given := value.get(word), list):
                made[word] = list(map(moved, given))
        if "properties" in value and not value.keys() & IN_PLACE and "patternProperties" not in value:
            made.setdefault("additionalProperties", False)
        return made

    found: dict[str, Any] = moved(schema)
    if not schema.keys() & IN_PLACE and "patternProperties" not in schema:
        found.setdefault("additionalProperties", False)
    return found


def _referring(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the objects that refer to another schema."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if "$ref" in each:
                yield {key: value for key, value in each.items() if key not in NOTES}
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _mentions(schema: Any, words: set[str]) -> bool:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if each.keys() & words:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False


def items_of(schema: Any, root: Schema) -> Any:
    """Returns the schema of a list's items; {} if the schema says nothing about them."""
    schema = resolved(schema, root)
    found = (each.get("items") for each in (schema, *(resolved(one, root) for one in choices(schema))))
    return next((each for each in found if isinstance(each, Mapping)), {})


def member(schema: Any, key: str, root: Schema) -> Any:
    """Returns the schema of an object's member; {} if the schema says nothing about it."""
    schema = resolved(schema, root)
    for each in (schema, *(resolved(one, root) for one in (*choices(schema), *(schema.get("allOf") or ())))):
        properties = each.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else {}


def types_of(schema: Any, root: Schema, depth: int = 0) -> set[str] | None:
    """Returns the types that a value may have; None if the schema does not tell."""
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {each for each in given if isinstance(each, str)}
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return {TYPES.get(type(value), "object") for value in values}
    found: set[str] = set()
    for each in choices(schema):
        types = types_of(each, root, depth + 1)
        if types is None:
            return None
        found |= types
    for each in schema.get("allOf") or ():
        found |= types_of(each, root, depth + 1) or set()
    if "properties" in schema:
        found.add("object")
    return found or None


def enumerated(schema: Any, root: Schema, depth: int = 0) -> list[Any] | None:
    """Returns the values that are listed, also in the parts of a union; None if others are possible."""
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return None
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    parts = [enumerated(each, root, depth + 1) for each in choices(schema)]
    return [value for part in parts for value in part or ()] if parts and None not in parts else None


def as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def fits(value: Any, schema: Any, root: Schema, depth: int = 0) -> bool:
    schema = resolved(schema, root)
    if depth > MAX_DEPTH:
        return True
    types, own = types_of(schema, root), TYPES[type(value)]
    if types is not None and own not in types and not (own == "integer" and "number" in types):
        return False
    values = enumerated(schema, root)
    if values is not None and value not in values:
        return False
    if isinstance(value, list):
        return "items" not in schema or all(fits(item, schema["items"], root, depth + 1) for item in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    if schema.get("additionalProperties") is False and not value.keys() <= known.keys():
        return False
    return all(key in value for key in required(schema)) and all(
        fits(value[key], known[key], root, depth + 1) for key in value.keys() & known.keys()
    )
