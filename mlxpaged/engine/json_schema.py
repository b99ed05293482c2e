"""JSON schemas are rewritten here if that makes them enforceable, and refused if they would trap the compiler.

A `oneOf` whose branches exclude each other means `anyOf`, which a grammar can express. That is how pydantic writes a
union with a discriminator. Any other `oneOf` stays, and is refused by the compiler.
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
"""Keywords whose value is no schema."""

MAX_PATTERN_CHARS = 8 * 1024
"""Of all regular expressions of a schema. The time to compile them grows with its square: half a second for these."""

MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, in units of their last decimal. The compiler builds a state for each
remainder, at 100,000 a second, and gives up only in some cases: with a million it had not ended after 8 seconds."""

MAX_BRANCHES = 64
"""Of a `oneOf`; all pairs of them are compared."""

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


def check_schema(schema: Any) -> None:
    """Raises ValueError for a schema that is no object, or that the compiler would not finish."""
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    nodes = list(_nodes(schema))
    texts = [text for node in nodes for text in (node.get("pattern"), *_object(node.get("patternProperties")))]
    length = sum(len(text) for text in texts if isinstance(text, str))
    if length > MAX_PATTERN_CHARS:
        raise ValueError(f"has patterns of {length} characters; the limit is {MAX_PATTERN_CHARS}")
    multiples = [Decimal(str(node["multipleOf"])) for node in nodes if type(node.get("multipleOf")) in (int, float)]
    decimals = max([0, *(-int(value.as_tuple().exponent) for value in multiples)])
    if decimals > 20 or math.lcm(*(int(abs(value).scaleb(decimals)) for value in multiples)) > MAX_MULTIPLE:
        raise ValueError(f"the least common multiple of all multipleOf is above {MAX_MULTIPLE}")


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, whether a schema or not."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _nodes(part)


def _object(value: Any) -> dict[str, Any]:
    """The value, or an empty object in the place of anything else."""
    return value if isinstance(value, dict) else {}


def disjoint_one_of_as_any_of(root: Any) -> Any:
    """The schema with every `oneOf` of branches that exclude each other by their types, or by a required property with
    different constants, written as `anyOf`."""
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
    """The strings that a property may have. Empty if the schema does not list them."""
    found = _object(_object(schema.get("properties")).get(name))
    if isinstance(found.get("const"), str):
        return {found["const"]}
    values = found.get("enum")
    return _strings(values) if isinstance(values, list) and all(isinstance(v, str) for v in values) else set()


def _strings(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema, or what it is a reference to."""
    reference = _object(schema).get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        schema = root
        for part in reference[2:].split("/"):
            schema = _object(schema).get(part.replace("~1", "/").replace("~0", "~"))
    return _object(schema)
