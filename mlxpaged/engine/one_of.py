"""`oneOf` in JSON schemas: where its branches exclude each other anyway, it means `anyOf`, which a grammar can say.

That is how pydantic writes a union with a discriminator. Any other `oneOf` stays, and is refused by the compiler.
"""

from __future__ import annotations

import itertools
from typing import Any

NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value maps names to schemas."""

DATA = {"const", "enum", "default", "examples", "example"}
"""Keywords whose value is no schema."""

MAX_BRANCHES = 64
"""Of a `oneOf`; all pairs of them are compared."""

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


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
    """The strings that a property is restricted to; none where it is not."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        return set()
    if isinstance(found.get("const"), str):
        return {found["const"]}
    values = found.get("enum")
    return _strings(values) if isinstance(values, list) and all(isinstance(v, str) for v in values) else set()


def _strings(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema, or what it is a reference to."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/"):
        found = root
        for part in schema["$ref"][2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else {}
