"""Random JSON schemas of what the server enforces. But for the unbounded ones, their texts are short: strings, arrays
and objects have a limit."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "größe", "a b", "x", "kind", "items", "ok?", "Z9", 'quo"te')
PATTERNS = ("^[a-z]{1,5}$", r"^\d{3}-\d{2}$", "^(ab|cd){1,3}$", "^x[^y]{0,4}y$")
FORMATS = ("date", "uuid", "ipv4")


def random_schema(seed: int) -> dict[str, Any]:
    """An object, an array or a scalar, some with shared definitions."""
    rng = random.Random(seed)
    schema = _schema(rng, depth=rng.randint(0, 3))
    if seed % 5 == 0:
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Shared",
            "$defs": {"part": _schema(rng, 1), "node": _node("leaf"), "leaf": _node(None)},
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/part"}, "tree": {"$ref": "#/$defs/node"}, "rest": schema},
            "required": ["first", "tree"],
            "additionalProperties": False,
        }
    return schema


def unbounded_schema(seed: int) -> dict[str, Any]:
    """An object whose texts end only if the model has a mind to: decimals, fractions of a second, nodes in nodes."""
    rng = random.Random(seed)
    low = rng.randint(-500, 500) / 4
    values: list[dict[str, Any]] = [
        {"type": "string", "format": rng.choice(["time", "date-time"])},
        {"type": "string", "format": "email", "maxLength": 20},
        {"type": "number", "minimum": low, "maximum": low + rng.choice([0.25, 1, 1000])},
        {"type": "number", "exclusiveMinimum": low},
        {"type": "integer", "maximum": rng.randint(-5, 5000)},
        {"$ref": "#/$defs/node"},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    ]
    names = rng.sample(NAMES, 2)
    return {
        "$defs": {"node": _node("node")},
        "type": "object",
        "properties": dict(zip(names, rng.sample(values, 2), strict=True)),
        "required": names,
        "additionalProperties": False,
    }


def _node(child: str | None) -> dict[str, Any]:
    """Of itself, the demo model may nest them until max_tokens."""
    ends: list[dict[str, Any]] = [{"type": "null"}] + ([{"$ref": f"#/$defs/{child}"}] if child else [])
    return {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": ends}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _enum, _constant, _simple]
    if depth:
        makers = [random_object, random_object, random_object, _array, _tuple, _any_of, _one_of]
    schema = rng.choice(makers)(rng, depth)
    return schema | ({"description": "some words"} if rng.random() < 0.2 else {})


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-500, 500)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 10_000)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randint(0, 99)}
    return {"type": "integer", **bounds} | ({"multipleOf": 1} if rng.random() < 0.2 else {})


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    """Of bounds alone it could go on with decimals for ever."""
    return {"type": "number", "enum": rng.sample([0.5, -2.25, 1e3, 7, 0.125], 3)}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "grün", 'say "hi"', 1, 2.5, None, True, ["a", 1], {"k": "v"}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _constant(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 0, None, False, [1, 2], {"deep": {"er": []}}])}


def _simple(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    """Told apart by a tag."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": _schema(rng, depth - 1)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for tag in ("one", "two")
        ]
    }
