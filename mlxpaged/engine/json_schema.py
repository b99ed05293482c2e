"""Rewrites JSON schemas if that makes them enforceable, and refuses those that the compiler would not finish.

A `oneOf` whose branches exclude each other means the same as `anyOf`, which a grammar can express. Pydantic writes a
union with a discriminator like that. Any other `oneOf` stays, and the compiler refuses it.

Exclusive bounds of numbers become inclusive ones next to them, because llguidance 1.9.1 takes 0 for a number that is
above 0 and at most 0.5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value maps names to schemas."""

DATA = {"const", "enum", "default", "examples", "example"}
"""Keywords whose value is not a schema."""

MAX_PATTERN_CHARS = 8 * 1024
"""Most characters of all regular expressions of a schema. Compiling takes quadratic time: half a second for these."""

MAX_MULTIPLE = 10_000
"""Largest least common multiple of all `multipleOf`, in units of their last decimal. The compiler builds a state for
each remainder, 100,000 a second, and stops only in some cases: a million were not done after 8 seconds."""

MAX_BRANCHES = 64
"""Most branches of a `oneOf` that are compared with each other, in pairs."""

NEAR = 1e-9
MAX_EXCLUSIVE = 10**6
"""How far an inclusive bound is from an exclusive one that is an integer below MAX_EXCLUSIVE. The compiler rounds
numbers of 16 digits."""

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


def check_schema(schema: Any) -> None:
    """Raises ValueError if a schema is not an object, or if the compiler would not finish it."""
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    nodes = list(_nodes(schema))
    length = sum(map(len, patterns(schema)))
    if length > MAX_PATTERN_CHARS:
        raise ValueError(f"has patterns of {length} characters; the limit is {MAX_PATTERN_CHARS}")
    multiples = [Decimal(str(node["multipleOf"])) for node in nodes if type(node.get("multipleOf")) in (int, float)]
    decimals = max([0, *(-int(value.as_tuple().exponent) for value in multiples)])
    if decimals > 20 or math.lcm(*(int(abs(value).scaleb(decimals)) for value in multiples)) > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf is above {MAX_MULTIPLE}")


def patterns(schema: Any) -> list[str]:
    """The regular expressions of a schema."""
    found = [text for node in _nodes(schema) for text in (node.get("pattern"), *_object(node.get("patternProperties")))]
    return [text for text in found if isinstance(text, str)]


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, including objects that are not schemas."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _nodes(part)


def _object(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def enforceable(root: Any) -> Any:
    """The schema, with `oneOf` written as `anyOf` if its branches exclude each other: by their types, or by a required
    property that has different constants. Exclusive bounds of numbers are inclusive ones."""
    return _rewritten(root, root)


def _rewritten(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_rewritten(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in DATA:
            result[key] = value
        elif key in NAMED and isinstance(value, dict):
            result[key] = {name: _rewritten(item, root) for name, item in value.items()}
        elif key == "oneOf" and "anyOf" not in schema and _exclude_each_other(value, root):
            result["anyOf"] = _rewritten(value, root)
        else:
            result[key] = _rewritten(value, root)
    return result if schema.get("type") == "integer" else _with_inclusive_bounds(result)


def _with_inclusive_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of numbers, with inclusive bounds in place of exclusive ones that are integers."""
    result = dict(schema)
    bound: Any
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        are_numbers = type(bound) in (int, float) and type(other) in (int, float, type(None))
        if are_numbers and abs(bound) < MAX_EXCLUSIVE and bound == int(bound):
            del result[exclusive]
            near = bound + sign * NEAR
            result[inclusive] = near if other is None else sign * max(sign * near, sign * other)
    return result


def _exclude_each_other(branches: Any, root: Any) -> bool:
    if not isinstance(branches, list) or len(branches) > MAX_BRANCHES:
        return False
    resolved = [_resolved(branch, root) for branch in branches]
    return all(_disjoint(a, b) for a, b in itertools.combinations(resolved, 2))


def _disjoint(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if not _types(a) & _types(b):
        return True
    if _types(a) | _types(b) != {"object"}:
        return False
    return any(
        _values(a, name) and _values(b, name) and not _values(a, name) & _values(b, name)
        for name in _strings(a.get("required")) & _strings(b.get("required"))
    )


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", list(TYPES))
    types = _strings([given] if isinstance(given, str) else given)
    return types | {"integer"} if "number" in types else types


def _values(schema: dict[str, Any], name: str) -> set[str]:
    """The strings that a property may be. Empty if the schema does not list them."""
    found = _object(_object(schema.get("properties")).get(name))
    if isinstance(found.get("const"), str):
        return {found["const"]}
    values = found.get("enum")
    return _strings(values) if isinstance(values, list) and all(isinstance(v, str) for v in values) else set()


def _strings(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that `schema` refers to, or `schema` itself."""
    reference = _object(schema).get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        schema = root
        for part in reference[2:].split("/"):
            schema = _object(schema).get(part.replace("~1", "/").replace("~0", "~"))
    return _object(schema)
