"""Schemas and grammars of a given depth, for each way in which one part can be in another. All are valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
LAST: Schema = {"type": "object", "additionalProperties": False}

WRAPPED: dict[str, tuple[Callable[[Schema], Schema], int]] = {
    "a reference": (lambda inner: inner, 1),
    "a reference beside a type": (lambda inner: {"type": "object", **inner}, 1),
    "properties": (lambda inner: {"type": "object", "properties": {"a": inner}, "additionalProperties": False}, 2),
    "additionalProperties": (lambda inner: {"type": "object", "additionalProperties": inner}, 2),
    "patternProperties": (lambda inner: {"type": "object", "patternProperties": {"^a": inner}}, 2),
    "items": (lambda inner: {"type": "array", "items": inner}, 2),
    "prefixItems": (lambda inner: {"type": "array", "prefixItems": [inner], "items": False}, 2),
    "anyOf": (lambda inner: {"anyOf": [inner, {"type": "null"}]}, 2),
    "anyOf beside a type": (lambda inner: {"type": "object", "anyOf": [inner]}, 2),
    "oneOf": (lambda inner: {"oneOf": [inner, {"type": "null"}]}, 2),
    "allOf": (lambda inner: {"allOf": [inner, {"type": "object"}]}, 2),
    "allOf in properties": (
        lambda inner: {"type": "object", "allOf": [{"properties": {"a": {"type": "object", "allOf": [inner]}}}]},
        4,
    ),
}
"""What is around the next reference, and of how many schemas that is."""

LOOSE: dict[str, Callable[[Schema], Schema]] = {
    "additionalItems": lambda inner: {"type": "array", "items": [{"type": "null"}], "additionalItems": inner},
    "contains": lambda inner: {"type": "array", "contains": inner},
    "dependentSchemas": lambda inner: {"type": "object", "dependentSchemas": {"a": inner}},
    "dependencies": lambda inner: {"type": "object", "dependencies": {"a": inner}},
    "else": lambda inner: {"if": {"type": "object"}, "else": inner},
    "if": lambda inner: {"if": inner, "then": {"type": "object"}},
    "not": lambda inner: {"type": "object", "not": inner},
    "propertyNames": lambda inner: {"type": "object", "propertyNames": inner},
    "then": lambda inner: {"if": {"type": "object"}, "then": inner},
    "unevaluatedItems": lambda inner: {"type": "array", "unevaluatedItems": inner},
    "unevaluatedProperties": lambda inner: {"type": "object", "unevaluatedProperties": inner},
    "an unknown keyword": lambda inner: {"type": "object", "unknown": inner},
}
"""The other keywords in which schemas are. Most are left out where a request does not insist on them."""


def chain(name: str, depth: int) -> Schema:
    """A schema in which `depth` schemas are in one another, each reference being another one."""
    wrap, size = WRAPPED[name]
    count = (depth - 2) // size
    defs = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": LAST}}


def nested(levels: int) -> Schema:
    """A schema with so many objects in one another."""
    schema: Schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def doubling(times: int) -> Schema:
    """A schema whose references copy 2^times schemas."""
    both = [{"type": "object", "properties": {k: copied(i + 1) for k in "ab"}} for i in range(times)]
    return {**copied(0), "$defs": {f"d{i}": schema for i, schema in enumerate([*both, LAST])}}


def copied(number: int) -> Schema:
    return {"type": "object", "$ref": f"#/$defs/d{number}"}


RULES: dict[str, tuple[str, int]] = {
    "rules": ('r{i}: "a" r{next}', 1800),
    "optional rules": ('r{i}: "a" [r{next}]', 1490),
    "terminals": ('R{i}: "a" R{next}', 1800),
    "terminals without another": ("R{i}: ~R{next}", 2000),
    "terminals in groups": ('R{i}: ((("a" R{next})))', 740),
}
"""What names the next rule, and how many of them are within all limits."""


def rules(name: str, count: int) -> str:
    """A grammar of a chain of rules."""
    rule, _ = RULES[name]
    first = rule[0]
    lines = [rule.replace("{i}", str(i)).replace("{next}", str(i + 1)) for i in range(count)]
    return "\n".join([f"start: {first}0", *lines, f'{first}{count}: "b"']) + "\n"
